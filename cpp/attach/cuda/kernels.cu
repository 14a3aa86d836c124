#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "attach/cuda/kernels.h"

namespace horovod_partial::attach {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kMostBlocks = 1024;

int Blocks(std::size_t elements) {
  const std::size_t blocks = (elements + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

template <class Body>
__global__ void ForEach(std::size_t elements, Body body) {
  const std::size_t stride = static_cast<std::size_t>(blockDim.x) * gridDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += stride)
    body(i);
}

template <class Body>
void Queue(std::size_t elements, cudaStream_t stream, Body body) {
  if (elements == 0) return;
  ForEach<<<Blocks(elements), kThreads, 0, stream>>>(elements, body);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Half precision is added and scaled in single precision, as on the host.
template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<__half> {
  using Type = float;
};

template <class T>
struct AddTo {
  T* target;
  const T* source;
  __device__ void operator()(std::size_t i) const {
    using W = typename Wide<T>::Type;
    target[i] = static_cast<T>(static_cast<W>(target[i]) + static_cast<W>(source[i]));
  }
};

template <class T>
struct AddUnless {
  AddTo<T> add;
  const int* found;
  bool first;
  __device__ void operator()(std::size_t i) const {
    if (*found != 0) return;
    if (first) {
      add.target[i] = add.source[i];
    } else {
      add(i);
    }
  }
};

template <class T>
struct ScaleBy {
  T* data;
  double factor;
  __device__ void operator()(std::size_t i) const {
    using W = typename Wide<T>::Type;
    data[i] = static_cast<T>(static_cast<W>(static_cast<double>(static_cast<W>(data[i])) * factor));
  }
};

template <class T>
struct FindNonFinite {
  const T* data;
  int* found;
  __device__ void operator()(std::size_t i) const {
    if (!isfinite(static_cast<double>(static_cast<typename Wide<T>::Type>(data[i])))) *found = 1;
  }
};

}  // namespace

void QueueAdd(DataType type, void* target, const void* source, std::size_t elements, cudaStream_t stream) {
  Dispatch<__half>(type, [&](auto zero) {
    using T = decltype(zero);
    Queue(elements, stream, AddTo<T>{static_cast<T*>(target), static_cast<const T*>(source)});
  });
}

void QueueAddUnless(const int* found, DataType type, void* target, const void* source, std::size_t elements, bool first,
                    cudaStream_t stream) {
  Dispatch<__half>(type, [&](auto zero) {
    using T = decltype(zero);
    const AddTo<T> add{static_cast<T*>(target), static_cast<const T*>(source)};
    Queue(elements, stream, AddUnless<T>{add, found, first});
  });
}

void QueueScale(DataType type, void* data, std::size_t elements, double factor, cudaStream_t stream) {
  Dispatch<__half>(type, [&](auto zero) {
    using T = decltype(zero);
    Queue(elements, stream, ScaleBy<T>{static_cast<T*>(data), factor});
  });
}

void QueueFindNonFinite(DataType type, const void* data, std::size_t elements, int* found, cudaStream_t stream) {
  const auto find = [&](auto zero) {
    using T = decltype(zero);
    Queue(elements, stream, FindNonFinite<T>{static_cast<const T*>(data), found});
  };
  if (type == DataType::kFloat16) find(__half{});
  if (type == DataType::kFloat32) find(float{});
  if (type == DataType::kFloat64) find(double{});
}

}  // namespace horovod_partial::attach
