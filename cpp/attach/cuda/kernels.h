// The element-wise operations of core/values/dtype.h on a GPU. Each operation is queued on `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/values/dtype.h"

namespace horovod_partial::attach {

void QueueAdd(DataType type, void* target, const void* source, std::size_t elements, cudaStream_t stream);
void QueueScale(DataType type, void* data, std::size_t elements, double factor, cudaStream_t stream);
// Sets `*found` to 1 if an element is infinite or not a number. `found` points to memory of the device.
void QueueFindNonFinite(DataType type, const void* data, std::size_t elements, int* found, cudaStream_t stream);
// Adds the source to the target, or copies it there if `first` is set. The kernel does nothing if `*found` is not 0.
void QueueAddUnless(const int* found, DataType type, void* target, const void* source, std::size_t elements, bool first,
                    cudaStream_t stream);

}  // namespace horovod_partial::attach
