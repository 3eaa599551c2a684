# Finds a CUDA compiler that works and sets
#   DEEP_MOE_WITH_CUDA      ON or OFF
#   DEEP_MOE_CUDA_SUMMARY   one line for people
#   deep_moe::cudart        the static runtime (imported target; only with CUDA)
# With DEEP_MOE_CUDA=AUTO a missing or broken nvcc is no error: the CPU backend is built alone.
#
# The toolkit may be a system installation or made of Python wheels (no libcuda stub, lib instead of lib64, no
# libcudart.so): only nvcc, the headers and libcudart_static.a are asked for.

set(DEEP_MOE_WITH_CUDA OFF)
set(DEEP_MOE_CUDA_SUMMARY "OFF")
string(TOUPPER "${DEEP_MOE_CUDA}" cuda_wanted)
if(cuda_wanted MATCHES "^(OFF|NO|FALSE|0)$")
  return()
elseif(cuda_wanted MATCHES "^(ON|YES|TRUE|1)$")
  set(cuda_required ON)
elseif(cuda_wanted STREQUAL "AUTO")
  set(cuda_required OFF)
else()
  message(FATAL_ERROR "DEEP_MOE_CUDA is '${DEEP_MOE_CUDA}'; allowed: AUTO, ON, OFF")
endif()

# Leaves this file: no CUDA in this build, or an error if it was asked for.
macro(deep_moe_no_cuda summary advice)
  if(cuda_required)
    message(FATAL_ERROR "DEEP_MOE_CUDA=ON, but ${summary}. ${advice}")
  endif()
  set(DEEP_MOE_CUDA_SUMMARY "OFF (${summary})")
  return()
endmacro()

# nvcc: CMAKE_CUDA_COMPILER, then CUDACXX, then PATH, then the usual places.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(DEEP_MOE_NVCC nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(DEEP_MOE_NVCC)
  if(DEEP_MOE_NVCC)
    set(ENV{CUDACXX} "${DEEP_MOE_NVCC}")
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE) # an earlier run found none: look again
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  deep_moe_no_cuda("no working nvcc was found" "Put nvcc on PATH or set CUDACXX to it; -DDEEP_MOE_CUDA=OFF builds without.")
endif()

# enable_language() asks for some architecture to try the compiler with; our targets set their own.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  deep_moe_no_cuda("${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}" "12.4 is the oldest that serves.")
endif()

# The architectures, and DEEP_MOE_CUDA_DEFINITIONS for the kernels.
include(cmake/CudaArchitectures.cmake)

# The static runtime travels with the library (cmake/Install.cmake), so that a C++ program needs no toolkit to link.
find_library(
  DEEP_MOE_CUDART_STATIC
  NAMES libcudart_static.a
  HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} "${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}"
  PATH_SUFFIXES lib64 lib targets/${CMAKE_SYSTEM_PROCESSOR}-linux/lib)
mark_as_advanced(DEEP_MOE_CUDART_STATIC)
if(NOT DEEP_MOE_CUDART_STATIC)
  deep_moe_no_cuda("libcudart_static.a was not found beside ${CMAKE_CUDA_COMPILER}" "Set -DDEEP_MOE_CUDART_STATIC=FILE.")
endif()
add_library(deep_moe::cudart STATIC IMPORTED GLOBAL)
set_target_properties(
  deep_moe::cudart PROPERTIES IMPORTED_LOCATION "${DEEP_MOE_CUDART_STATIC}"
                              INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")

set(DEEP_MOE_WITH_CUDA ON)
set(DEEP_MOE_CUDA_SUMMARY "ON (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${DEEP_MOE_CUDA_ARCHITECTURES})")

# Settings that every target with .cu files takes.
function(deep_moe_cuda_target target)
  set_target_properties(
    ${target}
    PROPERTIES CUDA_ARCHITECTURES "${DEEP_MOE_CUDA_ARCHITECTURES}"
               CUDA_RUNTIME_LIBRARY Static
               CUDA_SEPARABLE_COMPILATION OFF)
  if(CMAKE_VERSION VERSION_LESS 3.26) # does not know nvcc's C++20
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  else()
    set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(compress --compress-mode=size)
  else()
    set(compress "SHELL:-Xfatbin -compress-all")
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${compress}>")
  target_compile_definitions(${target} PRIVATE ${DEEP_MOE_CUDA_DEFINITIONS})
endfunction()
