# lm_program_faults(name [FULL_ONLY]): tests/faults/test_<name>.py, short as program_<name> and with full counts as
# faults_<name>. FULL_ONLY: no short form.
function(lm_program_faults name)
  cmake_parse_arguments(ARG "FULL_ONLY" "" "" ${ARGN})
  set(command -m pytest -q -p no:cacheprovider tests/faults/test_${name}.py)
  if(NOT ARG_FULL_ONLY)
    lm_python_test(program_${name} THREADS 2 COMMAND ${command})
  endif()
  lm_python_test(faults_${name} THREADS 2 COMMAND ${command})
  lm_reliability_rows(faults_${name} LM_FAULTS=full)
  # A suite of which every test was skipped is not shown.
  set_tests_properties(faults_${name} PROPERTIES LABELS faults TIMEOUT 3600
    SKIP_REGULAR_EXPRESSION "(^|\n)[0-9]+ skipped")
endfunction()

lm_program_faults(kill)
lm_program_faults(signals)
lm_program_faults(flips)
lm_program_faults(swap_flips)
lm_program_faults(races)
lm_program_faults(ends)
lm_program_faults(slurm FULL_ONLY)
lm_program_faults(slurm_ranks FULL_ONLY)
if(TARGET twin_rank)
  lm_program_faults(twin_resume)
endif()
