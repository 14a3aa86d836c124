// The element-wise operations of core/dtype.h on a device. Each is queued on `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/values/dtype.h"

namespace horovod_partial::attach {

void QueueAdd(DataType type, void* target, const void* source, std::size_t elements, cudaStream_t stream);
void QueueScale(DataType type, void* data, std::size_t elements, double factor, cudaStream_t stream);
// Sets `*found`, which is in the device's memory, to 1 if an element is infinite or not a number.
void QueueFindNonFinite(DataType type, const void* data, std::size_t elements, int* found, cudaStream_t stream);
// Adds, or copies if `first` is set. Does nothing if `*found` is not 0 when the stream gets there.
void QueueAddUnless(const int* found, DataType type, void* target, const void* source, std::size_t elements, bool first,
                    cudaStream_t stream);

}  // namespace horovod_partial::attach
