# LibTorch and the CUDA run-time libraries from a Python environment, as imported targets. Torch's own CMake
# package would look for a GPU and a CUDA toolkit even for the CPU executable; this needs neither.
if(NOT LM_PYTHON)
  message(FATAL_ERROR "LM_PYTHON is not set: run ./dev build, or pass -DLM_PYTHON=<env>/bin/python")
endif()
execute_process(COMMAND ${LM_PYTHON} -c "import sysconfig; print(sysconfig.get_path('platlib'))"
                OUTPUT_VARIABLE LM_SITE OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(LM_TORCH ${LM_SITE}/torch)
set(LM_CUDA_WHEELS ${LM_SITE}/nvidia)   # libcudart, libcupti, libnccl, ... beside torch
if(NOT EXISTS ${LM_TORCH}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "no LibTorch in ${LM_SITE}: pip install -r requirements.txt into LM_PYTHON's environment")
endif()

execute_process(COMMAND ${LM_PYTHON} -c "import importlib.metadata as m; print(m.version('torch'))"
                OUTPUT_VARIABLE LM_TORCH_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

add_library(torch::cpu INTERFACE IMPORTED)
target_include_directories(torch::cpu SYSTEM INTERFACE ${LM_TORCH}/include)
target_link_directories(torch::cpu INTERFACE ${LM_TORCH}/lib ${LM_CUDA_WHEELS}/cu13/lib)
target_link_libraries(torch::cpu INTERFACE torch_cpu c10)
target_link_options(torch::cpu INTERFACE
  -Wl,-rpath-link,${LM_TORCH}/lib:${LM_CUDA_WHEELS}/cu13/lib:${LM_CUDA_WHEELS}/cusparselt/lib:${LM_CUDA_WHEELS}/cudnn/lib)

# torch_cuda registers its kernels when it is loaded; nothing refers to a symbol of it, so it must be kept.
add_library(torch::cuda INTERFACE IMPORTED)
target_link_libraries(torch::cuda INTERFACE torch::cpu
  -Wl,--push-state,--no-as-needed torch_cuda c10_cuda -Wl,--pop-state)

# One OpenMP runtime in a process: the one torch brings has the system's soname, so linking either by name loads
# torch's first (it stands first in the run path).
set(CMAKE_BUILD_RPATH ${LM_TORCH}/lib ${LM_CUDA_WHEELS}/cu13/lib ${LM_CUDA_WHEELS}/cudnn/lib
    ${LM_CUDA_WHEELS}/cusparselt/lib ${LM_CUDA_WHEELS}/nccl/lib ${LM_CUDA_WHEELS}/nvshmem/lib)
