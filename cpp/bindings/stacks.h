// The stacks of all threads of this process, without the interpreter's lock: one of them may keep it.
#pragma once

#include <string>
#include <utility>

namespace horovod_partial {

// Python's faulthandler writes stacks in the handler of a signal, in many small pieces. So it is given a file in
// memory, and what is there is read in one piece. Returns the numbers of the signal and of the file, the same ones in
// every call; 0 for the signal where there is none to be had.
std::pair<int, int> PrepareStacks();

// Any thread, and no other one is interrupted: the signal goes to the calling one. Empty where the handler is gone.
std::string TakeStacks();

}  // namespace horovod_partial
