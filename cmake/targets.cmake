# Flags and the three kinds of target.

# AdamW, norms and rounding fix every operation: nothing may be contracted to fma behind our back, and sqrt must
# not be kept from vectorising by errno.
add_library(lm_flags INTERFACE)
# gcc 12 reports -Wrestrict for std::string concatenation in its own header (a false positive it cannot place).
target_compile_options(lm_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-restrict -ffp-contract=off -fno-math-errno>)
if(LM_SANITIZE MATCHES thread)
  # It does not see libgomp's barriers: loops run on one thread there, and it looks at the threads of our own.
  target_compile_options(lm_flags INTERFACE -Wno-unknown-pragmas -Wno-unused-parameter)
  target_link_libraries(lm_flags INTERFACE gomp)
else()
  target_compile_options(lm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  target_link_options(lm_flags INTERFACE -fopenmp)
endif()
target_include_directories(lm_flags INTERFACE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
if(LM_WERROR)
  target_compile_options(lm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(LM_SANITIZE)
  # Lines are enough to place a report; following variables through instrumented kernels takes gcc minutes a file, and so do
  # checks of pointers for null, which a signal tells as well. What it then reports of std::regex's memory is wrong.
  target_compile_options(lm_flags INTERFACE -O1 -g1 -Wno-maybe-uninitialized -fsanitize=${LM_SANITIZE} -fno-sanitize=null
                         -fno-omit-frame-pointer)
  target_link_options(lm_flags INTERFACE -fsanitize=${LM_SANITIZE})
endif()

# lm_library(name SOURCES a.cpp ... DEPENDS lm_base ...)
function(lm_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC lm_flags ${ARG_DEPENDS})
endfunction()

set(LM_TEST_SECONDS 600)  # a test that takes longer hangs
if(LM_SANITIZE)
  set(LM_TEST_SECONDS 2400)
endif()

find_package(GTest REQUIRED)
# The tests' main function: a skipped test is counted by ctest, not passed over.
add_library(lm_test_main STATIC ${PROJECT_SOURCE_DIR}/tests/support/test_main.cpp)
target_include_directories(lm_test_main PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(lm_test_main PUBLIC GTest::gtest lm_base)

# Tests without LibTorch and NCCL: a thread sanitizer does not know what their threads do.
add_custom_target(torch_free_tests)
# What `./dev test --quick` builds: these, and other tests with the label `quick`.
add_custom_target(quick_tests DEPENDS torch_free_tests)

# Of every test's environment: OpenMP threads that spin for each other on a machine with other work on it take ten times as long.
# (OMP_WAIT_POLICY would not reach the programs that lmlaunch starts: it drops what may change results.)
set(LM_SLEEPING_THREADS GOMP_SPINCOUNT=0)

# lm_test(name [LONG] SOURCES a_test.cpp ... DEPENDS lm_base ...): one executable, one ctest entry of that name. LONG:
# only `./dev test --full` runs it.
function(lm_test name)
  cmake_parse_arguments(ARG "LONG" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE lm_flags ${ARG_DEPENDS} lm_test_main)
  add_test(NAME ${name} COMMAND ${name})
  set(environment ${LM_SLEEPING_THREADS})
  if(LM_SANITIZE MATCHES thread)
    # Tests fork; their children have threads of their own.
    list(APPEND environment TSAN_OPTIONS=die_after_fork=0)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${LM_TEST_SECONDS} SKIP_RETURN_CODE 77 ENVIRONMENT "${environment}")
  if(ARG_LONG)
    set_tests_properties(${name} PROPERTIES LABELS long)
  elseif(NOT "${name} ${ARG_DEPENDS}" MATCHES "torch|cuda|nccl|emulator")
    set_tests_properties(${name} PROPERTIES LABELS "torch_free;quick")
    add_dependencies(torch_free_tests ${name})
  endif()
endfunction()

# lm_gpu_test(name [LONG] [TORCH] [UNORDERED] [QUICK FILTER] SOURCES a_test.cpp ... DEPENDS lm_base ...): a test of code that runs on a GPU.
# Built for real GPUs, where gpu_checks.sh runs it (here it skips without one), and on the emulator, as emulator_<name>: as it
# comes, as late as possible (_lazy), and so with the order checker (_order; not for tests that time what they do). TORCH:
# it needs LibTorch. QUICK: only the tests that FILTER names run in `./dev test`.
function(lm_gpu_test name)
  cmake_parse_arguments(ARG "LONG;TORCH;UNORDERED" "QUICK" "SOURCES;DEPENDS" ${ARGN})
  set(long "")
  if(ARG_LONG)
    set(long LONG)
  endif()
  set(torch "")
  if(ARG_TORCH)
    set(torch TORCH)
  endif()
  if(LM_HAVE_CUDA)
    lm_test(${name} ${long} SOURCES ${ARG_SOURCES}
            DEPENDS ${ARG_DEPENDS} $<$<BOOL:${ARG_TORCH}>:lm_torch_cuda> lm_device_cuda)
    set_property(GLOBAL APPEND PROPERTY LM_GPU_TESTS ${name})
  endif()
  if(NOT TARGET lm_device_emulator)
    return()
  endif()
  add_executable(emulator_${name} ${ARG_SOURCES})
  target_link_libraries(emulator_${name} PRIVATE lm_flags ${ARG_DEPENDS} $<$<BOOL:${ARG_TORCH}>:lm_torch_emulator> lm_device_emulator
                        lm_test_main)
  lm_emulator_link(emulator_${name} ${torch})
  set(modes lazy)
  if(NOT ARG_UNORDERED)
    list(APPEND modes order)
  endif()
  lm_emulator_entries(emulator_${name} ${long} QUICK "${ARG_QUICK}" MODES ${modes})
endfunction()

# lm_gpu_program(name [TORCH] SOURCES ... DEPENDS ...): an executable that runs on a GPU, built for real ones and, as
# emulator_<name>, on the emulator.
function(lm_gpu_program name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  set(torch "")
  if(ARG_TORCH)
    set(torch TORCH)
  endif()
  if(LM_HAVE_CUDA)
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE lm_flags ${ARG_DEPENDS} $<$<BOOL:${ARG_TORCH}>:lm_torch_cuda> lm_device_cuda)
  endif()
  if(TARGET lm_device_emulator)
    add_executable(emulator_${name} ${ARG_SOURCES})
    target_link_libraries(emulator_${name} PRIVATE lm_flags ${ARG_DEPENDS} $<$<BOOL:${ARG_TORCH}>:lm_torch_emulator> lm_device_emulator)
    lm_emulator_link(emulator_${name} ${torch})
  endif()
endfunction()

# lm_python_test(name [LONG | QUICK | APPARATUS] [THREADS n] COMMAND args...): a ctest entry that runs LM_PYTHON with args. pytest, and
# scripts of their own, end with 77 when something was skipped (tests/conftest.py). pytest runs where torch is imported already, if it
# can. QUICK: it needs no LibTorch, and is in `./dev test --quick`. APPARATUS: it tests the test apparatus, and `./dev test` runs it
# only when that has changed. THREADS: for what computes on more than one core most of its time; nothing else then runs beside it.
function(lm_python_test name)
  cmake_parse_arguments(ARG "LONG;QUICK;APPARATUS" "THREADS" "COMMAND" ${ARGN})
  string(REGEX REPLACE "^-m;pytest;" "tests/support/warm_pytest.py;" command "${ARG_COMMAND}")
  add_test(NAME ${name} COMMAND ${LM_PYTHON} ${command} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${LM_TEST_SECONDS} SKIP_RETURN_CODE 77
    ENVIRONMENT "${LM_SLEEPING_THREADS};LM_SANITIZE=${LM_SANITIZE};LM_BIN=${CMAKE_RUNTIME_OUTPUT_DIRECTORY};LMLAUNCH_PYTHON=${LM_PYTHON};PYTHONDONTWRITEBYTECODE=1")
  if(ARG_THREADS)
    set_tests_properties(${name} PROPERTIES PROCESSORS ${ARG_THREADS})
  endif()
  foreach(label LONG QUICK APPARATUS)
    if(ARG_${label})
      string(TOLOWER ${label} label)
      set_tests_properties(${name} PROPERTIES LABELS ${label})
    endif()
  endforeach()
endfunction()

# lm_reliability_rows(entry SHORT | FULL | ONLY): an entry of `./dev test --faults` (label `faults`), which has the counts of CI, or
# of `./dev test --faults --full` (label `faults_full`); ONLY: of both, it has but one form. With full counts it runs alone: cutting the
# power of one disk while another suite counts seconds would disturb both for long. Its rows go into a folder of its own, where
# tests/faults/report.py looks for them. (The label `hours`: `./dev test --full` leaves it out.)
function(lm_reliability_rows entry counts)
  set(labels_SHORT faults)
  set(labels_FULL faults_full)
  set(labels_ONLY faults faults_full)
  set(environment_SHORT short)
  set(environment_FULL full)
  set(environment_ONLY full)
  set_property(TEST ${entry} APPEND PROPERTY LABELS ${labels_${counts}})
  set_property(TEST ${entry} APPEND PROPERTY ENVIRONMENT
    LM_RELIABILITY=${PROJECT_BINARY_DIR}/reliability/${entry} LM_FAULTS=${environment_${counts}})
  if(counts STREQUAL "FULL")
    set_property(TEST ${entry} PROPERTY RUN_SERIAL ON)
  endif()
endfunction()

# lm_benchmark(name.py [PROGRAM program SOURCES ... DEPENDS ...]): benchmarks/name.py, which `./dev bench` runs with
# LM_PYTHON, and the executable that is our side of it.
function(lm_benchmark name)
  cmake_parse_arguments(ARG "" "PROGRAM" "SOURCES;DEPENDS" ${ARGN})
  set_property(GLOBAL APPEND PROPERTY LM_BENCHMARKS ${name})
  if(ARG_PROGRAM)
    add_executable(${ARG_PROGRAM} ${ARG_SOURCES})
    target_link_libraries(${ARG_PROGRAM} PRIVATE lm_flags ${ARG_DEPENDS})
  endif()
endfunction()

# lm_gpu_benchmark(name [TORCH] SOURCES ... DEPENDS ...): an executable that gpu_checks.sh runs on a GPU; on the emulator it
# only shows that it works.
function(lm_gpu_benchmark name)
  lm_gpu_program(${name} ${ARGN})
  if(LM_HAVE_CUDA)
    set_property(GLOBAL APPEND PROPERTY LM_GPU_BENCHMARKS ${name})
  endif()
endfunction()

# Writes the lists that ./dev and cmake/bundle.py read; called last.
function(lm_write_lists)
  foreach(list GPU_TESTS BENCHMARKS GPU_BENCHMARKS)
    get_property(names GLOBAL PROPERTY LM_${list})
    string(TOLOWER ${list} file)
    list(JOIN names "\n" text)
    file(WRITE ${PROJECT_BINARY_DIR}/${file}.txt "${text}\n")
  endforeach()
endfunction()

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)  # header-only: nothing to carry beside the executables
find_package(nlohmann_json REQUIRED)

set(LM_HAVE_CUDA OFF)
if(NOT LM_CUDA STREQUAL "OFF")
  find_program(LM_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(LM_NVCC)
    set(LM_HAVE_CUDA ON)
    set(CMAKE_CUDA_COMPILER ${LM_NVCC})
    set(CMAKE_CUDA_ARCHITECTURES ${LM_CUDA_ARCHS})
    if(LM_CUDA_ARCHS STREQUAL "release")
      set(CMAKE_CUDA_ARCHITECTURES ${LM_RELEASE_ARCHS})
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
  elseif(LM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LM_CUDA=ON, and no nvcc was found")
  endif()
endif()
