# Power cuts, failing operations and full disks.
add_executable(save_tool save_tool.cpp)
target_link_libraries(save_tool PRIVATE lm_flags lm_checkpoint lm_device_cpu)

# lm_fault_script(name SCRIPT file.py SHORT args... FULL args... [THREADS n]): name with SHORT's arguments, and
# faults_<name> with FULL's.
function(lm_fault_script name)
  cmake_parse_arguments(ARG "" "SCRIPT;THREADS" "SHORT;FULL" ${ARGN})
  foreach(entry ${name} faults_${name})
    set(arguments ${ARG_FULL})
    if(entry STREQUAL name)
      set(arguments ${ARG_SHORT})
    endif()
    lm_python_test(${entry} THREADS ${ARG_THREADS} COMMAND tests/faults/${ARG_SCRIPT} ${arguments})
  endforeach()
  set_tests_properties(faults_${name} PROPERTIES TIMEOUT 1800)
  lm_reliability_rows(${name} SHORT)
  lm_reliability_rows(faults_${name} FULL)
endfunction()

lm_fault_script(power_cut SCRIPT power_cut.py SHORT --short)
lm_fault_script(full_disk_saves SCRIPT full_disk_saves.py SHORT --short THREADS 2)
lm_fault_script(read_only_saves SCRIPT read_only_saves.py SHORT --short THREADS 2)
lm_fault_script(slow_disk SCRIPT slow_disk.py THREADS 2)
# A device that one of them lets go may be the next that another takes.
set_tests_properties(power_cut full_disk_saves read_only_saves slow_disk faults_power_cut faults_full_disk_saves faults_read_only_saves
                     faults_slow_disk PROPERTIES RESOURCE_LOCK loop_devices)

# lm_fault_test(name SHORT filter FULL filter SOURCES ... DEPENDS ...): the same of tests by GoogleTest's filters.
function(lm_fault_test name)
  cmake_parse_arguments(ARG "" "SHORT;FULL" "SOURCES;DEPENDS" ${ARGN})
  lm_test(${name} SOURCES ${ARG_SOURCES} DEPENDS ${ARG_DEPENDS})
  set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT GTEST_FILTER=${ARG_SHORT})
  add_test(NAME faults_${name} COMMAND ${name})
  set_tests_properties(faults_${name} PROPERTIES TIMEOUT 1800 SKIP_RETURN_CODE 77
    ENVIRONMENT "${LM_SLEEPING_THREADS};GTEST_FILTER=${ARG_FULL}")
  lm_reliability_rows(${name} SHORT)
  lm_reliability_rows(faults_${name} FULL)
endfunction()

lm_fault_test(checkpoint_faults_test SHORT * FULL *ASave:*ALoad SOURCES checkpoint_faults_test.cpp failing_calls.cpp
              DEPENDS lm_checkpoint lm_device_cpu)
lm_fault_test(training_faults_test SHORT *Some* FULL *Every* SOURCES training_faults_test.cpp ../train/offloaded_run.cpp
              DEPENDS lm_train lm_sim_disk lm_torch_cpu lm_device_cpu)
lm_fault_test(training_calls_test SHORT *Some*:*SetUp FULL *Every*
              SOURCES training_calls_test.cpp failing_calls.cpp ../train/offloaded_run.cpp
              DEPENDS lm_train lm_sim_disk lm_torch_cpu lm_device_cpu)
set_tests_properties(training_calls_test faults_training_calls_test PROPERTIES PROCESSORS 2)
set_tests_properties(training_faults_test faults_training_faults_test PROPERTIES PROCESSORS 2)

# A thousand flips and a thousand stale chunks, on disks and in host memory, of which offload_faults_test (tests/train) has some.
add_test(NAME faults_flips_in_memory COMMAND offload_faults_test)
set_tests_properties(faults_flips_in_memory PROPERTIES TIMEOUT 1800 SKIP_RETURN_CODE 77 PROCESSORS 2
  ENVIRONMENT "${LM_SLEEPING_THREADS};GTEST_FILTER=*OneThousand*;GTEST_ALSO_RUN_DISABLED_TESTS=1")
lm_reliability_rows(faults_flips_in_memory FULL)
