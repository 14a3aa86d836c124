# Compile the attachment and TensorFlow's kernels as for a Horovod with CUDA and NCCL, so that this path cannot rot where
# there is no GPU.
# Compiler and headers are those of requirements/gpu.txt, or of an installed toolkit.
set(toolkit "${Python_SITEARCH}/nvidia/cu13")
find_path(CUDA_HEADERS cuda_runtime.h HINTS "${toolkit}/include" REQUIRED)
find_path(NCCL_HEADERS nccl.h HINTS "${Python_SITEARCH}/nvidia/nccl/include" REQUIRED)
find_program(NVCC nvcc HINTS "${toolkit}/bin" REQUIRED)

add_custom_target(check_gpu)
function(add_check name libraries)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  target_link_libraries(${name} PRIVATE ${libraries} horovod)
  target_include_directories(${name} SYSTEM PRIVATE "${CUDA_HEADERS}" "${NCCL_HEADERS}")
  target_compile_definitions(${name} PRIVATE HAVE_GPU=1 HAVE_CUDA=1 HAVE_NCCL=1)
  add_dependencies(check_gpu ${name})
endfunction()
add_check(attach_gpu engine ${attach_sources} ${cuda_sources})
if(TARGET tensorflow)
  add_check(tensorflow_ops_gpu "tensorflow;engine" ${tf_sources})
  target_compile_definitions(tensorflow_ops_gpu PRIVATE HOROVOD_PARTIAL_GPU_KERNELS=1)
endif()

# CMake's own support for CUDA wants a whole toolkit, with libraries to link a test program with.
foreach(source IN LISTS cuda_sources)
  if(source MATCHES "\\.cu$")
    get_filename_component(name "${source}" NAME)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${name}.o")
    add_custom_command(OUTPUT "${object}" DEPENDS "${source}"
      COMMAND "${NVCC}" -std=c++17 -Xcompiler -fPIC -Werror all-warnings "-I${CMAKE_CURRENT_SOURCE_DIR}/cpp"
        "-I${CUDA_HEADERS}" -c "${source}" -o "${object}" VERBATIM)
    list(APPEND kernels "${object}")
  endif()
endforeach()
add_custom_target(attach_gpu_kernels DEPENDS ${kernels})
add_dependencies(check_gpu attach_gpu_kernels)
