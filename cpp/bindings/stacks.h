// The stacks of all threads of this process, taken without the interpreter's lock, which a blocked thread may hold.
#pragma once

#include <string>
#include <utility>

namespace horovod_partial {

// Python's faulthandler writes stacks in a signal handler, in many small pieces. So it gets a file in memory, which
// TakeStacks reads in one piece. Returns the numbers of the signal and of the file, which are the same in every call.
// The signal is 0 if there is no file or no unused signal.
std::pair<int, int> PrepareStacks();

// Returns the stacks of all threads, or an empty text if the signal handler that writes them is gone. The signal
// interrupts only the calling thread. Any thread may call this.
std::string TakeStacks();

}  // namespace horovod_partial
