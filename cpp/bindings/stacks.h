// Takes the stacks of all threads of this process, even while a blocked thread holds the interpreter's lock.
#pragma once

#include <string>
#include <utility>

namespace horovod_partial {

// Returns a signal and a file in memory, for which Python must register its faulthandler. The handler writes stacks in
// many small pieces, so it writes to this file, and TakeStacks reads the file in one piece. Every call returns the same
// two numbers. The signal is 0 if there is no file or no unused signal.
std::pair<int, int> PrepareStacks();

// Returns the stacks of all threads, or an empty text if no handler of Python's writes them. The signal that starts the
// handler interrupts only the calling thread. Any thread may call this.
std::string TakeStacks();

}  // namespace horovod_partial
