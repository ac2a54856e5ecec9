# Flags and the three kinds of target.

# AdamW, norms and rounding fix every operation: nothing may be contracted to fma behind our back, and sqrt must
# not be kept from vectorising by errno.
add_library(lm_flags INTERFACE)
target_compile_options(lm_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off -fno-math-errno -fopenmp>)
target_link_options(lm_flags INTERFACE -fopenmp)
target_include_directories(lm_flags INTERFACE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
if(LM_WERROR)
  target_compile_options(lm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(LM_SANITIZE)
  target_compile_options(lm_flags INTERFACE -fsanitize=${LM_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(lm_flags INTERFACE -fsanitize=${LM_SANITIZE})
endif()

# lm_library(name SOURCES a.cpp ... DEPENDS lm_base ...)
function(lm_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC lm_flags ${ARG_DEPENDS})
endfunction()

# lm_test(name SOURCES a_test.cpp ... DEPENDS lm_base ...): one executable, one ctest entry of that name.
function(lm_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE lm_flags ${ARG_DEPENDS} GTest::gtest GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600)
endfunction()

find_package(GTest REQUIRED)
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)

set(LM_HAVE_CUDA OFF)
if(NOT LM_CUDA STREQUAL "OFF")
  find_program(LM_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(LM_NVCC)
    set(LM_HAVE_CUDA ON)
    set(CMAKE_CUDA_COMPILER ${LM_NVCC})
    set(CMAKE_CUDA_ARCHITECTURES ${LM_CUDA_ARCHS})
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
  elseif(LM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LM_CUDA=ON, and no nvcc was found")
  endif()
endif()
