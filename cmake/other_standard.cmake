# The target other_standard: every source compiled by the C++ standard that the extensions are not built with. Frameworks ask for
# C++17 or C++20, and a build has one of them.
set(other_standard 20)
if(CMAKE_CXX_STANDARD GREATER 17)
  set(other_standard 17)
endif()

add_custom_target(other_standard)
function(add_in_other_standard name libraries)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  target_link_libraries(${name} PRIVATE ${libraries})
  target_compile_options(${name} PRIVATE -O0)
  set_target_properties(${name} PROPERTIES CXX_STANDARD ${other_standard})
  add_dependencies(other_standard ${name})
endfunction()
add_in_other_standard(core_other core
  ${core_sources} ${recording_sources} ${engine_sources} ${heartbeat_sources} ${simulator_sources})
add_in_other_standard(bindings_other "simulator;attach;pybind11::module"
  cpp/bindings/core_module.cc cpp/bindings/simulator_bindings.cc cpp/bindings/attach_module.cc cpp/bindings/monitor_calls.cc
  cpp/bindings/stacks.cc)
add_in_other_standard(attach_other attach ${attach_sources})
if(TARGET tensorflow)
  add_in_other_standard(tensorflow_ops_other "tensorflow;attach" ${tf_sources})
endif()
