# Compile the attachment as for a Horovod with CUDA and NCCL, so that this path cannot rot where there is no GPU.
# The headers are those of requirements/gpu.txt, or of an installed toolkit.
find_path(CUDA_HEADERS cuda_runtime.h HINTS "${Python_SITEARCH}/nvidia/cu13/include" REQUIRED)
find_path(NCCL_HEADERS nccl.h HINTS "${Python_SITEARCH}/nvidia/nccl/include" REQUIRED)

add_library(attach_gpu OBJECT EXCLUDE_FROM_ALL ${attach_sources})
target_link_libraries(attach_gpu PRIVATE engine horovod)
target_include_directories(attach_gpu SYSTEM PRIVATE "${CUDA_HEADERS}" "${NCCL_HEADERS}")
target_compile_definitions(attach_gpu PRIVATE HAVE_GPU=1 HAVE_CUDA=1 HAVE_NCCL=1)
