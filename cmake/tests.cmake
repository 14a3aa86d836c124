# Every tests/cpp/test_*.cc is a GoogleTest executable and a test of ctest, every tests/cpp/bench_*.cc a Google Benchmark.
find_package(GTest)
find_package(benchmark)

set(test_timeout_seconds 240)
if(HOROVOD_PARTIAL_SANITIZE)
  set(test_timeout_seconds 600) # ThreadSanitizer slows a test down 5 to 15 times
endif()

add_custom_target(cpp_tests)

if(GTest_FOUND)
  file(GLOB tests CONFIGURE_DEPENDS tests/cpp/test_*.cc)
  foreach(source IN LISTS tests)
    get_filename_component(name "${source}" NAME_WE)
    if(HOROVOD_PARTIAL_SANITIZE STREQUAL "thread" AND name STREQUAL "test_exhaustive")
      continue() # it has one thread and takes minutes; AddressSanitizer has it
    endif()
    add_executable(${name} EXCLUDE_FROM_ALL "${source}")
    target_include_directories(${name} PRIVATE tests/cpp)
    target_link_libraries(${name} PRIVATE engine heartbeat simulator GTest::gmock GTest::gtest_main)
    add_dependencies(cpp_tests ${name})
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${test_timeout_seconds})
  endforeach()
else()
  message(WARNING "GoogleTest was not found, so there are no C++ tests: install libgtest-dev and libgmock-dev.")
endif()

if(benchmark_FOUND)
  file(GLOB benchmarks CONFIGURE_DEPENDS tests/cpp/bench_*.cc)
  foreach(source IN LISTS benchmarks)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} EXCLUDE_FROM_ALL "${source}")
    target_link_libraries(${name} PRIVATE engine benchmark::benchmark_main)
    add_dependencies(cpp_tests ${name})
  endforeach()
endif()
