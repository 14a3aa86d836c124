// The stacks of all threads of this process, taken without the interpreter's lock, which a blocked thread may hold.
#pragma once

#include <string>
#include <utility>

namespace horovod_partial {

// Python's faulthandler writes stacks in a signal handler, in many small pieces. So it gets a file in memory, and
// TakeStacks reads that in one piece. Returns the numbers of the signal and of the file, the same ones in every call.
// The signal is 0 if there is no file or no unused signal.
std::pair<int, int> PrepareStacks();

// Any thread may call this. The signal goes to the calling thread, and interrupts no other one. Returns an empty text
// if the handler is gone.
std::string TakeStacks();

}  // namespace horovod_partial
