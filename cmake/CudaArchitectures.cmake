# For which GPUs the kernels are compiled, and with which of their features. Sets
#   DEEP_MOE_CUDA_ARCHITECTURES   in the form of CMAKE_CUDA_ARCHITECTURES
#   DEEP_MOE_SM90_ARCHITECTURES   those of them whose code uses what came with sm_90
#   DEEP_MOE_CUDA_DEFINITIONS     compile definitions of every target with kernels

# Reads TORCH_CUDA_ARCH_LIST, such as "8.0 9.0a+PTX": numbers parted by blanks or semicolons; +PTX adds PTX of that one.
function(deep_moe_parse_torch_list text result)
  string(REGEX REPLACE "[ ;,]+" ";" items "${text}")
  set(parsed "")
  foreach(item IN LISTS items)
    if(item STREQUAL "")
      continue()
    elseif(NOT item MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST is '${text}'; allowed: numbers such as 8.0, 9.0a or 9.0+PTX, not '${item}'")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
    set(ptx "${CMAKE_MATCH_4}")
    list(APPEND parsed "${number}-real")
    if(ptx)
      list(APPEND parsed "${number}-virtual")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES parsed)
  set(${result} "${parsed}" PARENT_SCOPE)
endfunction()

# The first that is set: the options, DEEP_MOE_CUDA_ARCHITECTURES and CMAKE_CUDA_ARCHITECTURES; the environment, in the
# order below; else everything that the kernels are tuned for. 90a and 100a code runs on those chips alone, so one plain
# PTX target covers what comes after.
if(CMAKE_CUDA_ARCHITECTURES)
  set(default_architectures "${CMAKE_CUDA_ARCHITECTURES}")
elseif(NOT "$ENV{DEEP_MOE_CUDA_ARCHITECTURES}" STREQUAL "")
  set(default_architectures "$ENV{DEEP_MOE_CUDA_ARCHITECTURES}")
elseif(NOT "$ENV{CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
  set(default_architectures "$ENV{CMAKE_CUDA_ARCHITECTURES}")
elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  deep_moe_parse_torch_list("$ENV{TORCH_CUDA_ARCH_LIST}" default_architectures)
else()
  set(default_architectures 80-real 90a-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND default_architectures 100a-real)
  endif()
  list(APPEND default_architectures 90-virtual)
endif()
set(DEEP_MOE_CUDA_ARCHITECTURES "${default_architectures}"
    CACHE STRING "GPU architectures, in the form of CMAKE_CUDA_ARCHITECTURES")
foreach(architecture IN LISTS DEEP_MOE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
    message(FATAL_ERROR "GPU architecture '${architecture}'; allowed: 80 and later, such as 80-real, 90a or 90-virtual")
  endif()
endforeach()

# DISABLE_SM90_FEATURES: 1 leaves the copy engine and early launches out of all code; a list of architectures, such as
# "100", out of theirs. Code for sm_80 never has them. DISABLE_AGGRESSIVE_PTX_INSTRS=1: no cache hints on loads.
set(DEEP_MOE_DISABLE_SM90_FEATURES "$ENV{DISABLE_SM90_FEATURES}"
    CACHE STRING "Kernels without sm_90's features: empty or 0, 1 for all code, or architectures such as 100")
set(DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS "$ENV{DISABLE_AGGRESSIVE_PTX_INSTRS}"
    CACHE STRING "1: kernels without cache hints on loads; empty or 0: with")
set(DEEP_MOE_CUDA_DEFINITIONS "")
set(DEEP_MOE_SM90_ARCHITECTURES ${DEEP_MOE_CUDA_ARCHITECTURES})
list(FILTER DEEP_MOE_SM90_ARCHITECTURES EXCLUDE REGEX "^8[0-9]")
string(REGEX REPLACE "[ ,]+" ";" disabled "${DEEP_MOE_DISABLE_SM90_FEATURES}")
if(disabled MATCHES "^(1|ON)$")
  list(APPEND DEEP_MOE_CUDA_DEFINITIONS DEEP_MOE_DISABLE_SM90_FEATURES=1)
  set(DEEP_MOE_SM90_ARCHITECTURES "")
elseif(NOT disabled MATCHES "^(|0|OFF)$")
  set(values "")
  foreach(item IN LISTS disabled)
    if(NOT item MATCHES "^([0-9]+)[af]?$" OR CMAKE_MATCH_1 LESS 80)
      message(FATAL_ERROR "DISABLE_SM90_FEATURES is '${DEEP_MOE_DISABLE_SM90_FEATURES}'; allowed: 0, 1, or a list of "
                          "architectures such as 90")
    endif()
    math(EXPR values "0${values} * 10000 + ${CMAKE_MATCH_1}0") # one number, for nvcc takes -D apart at commas
    list(FILTER DEEP_MOE_SM90_ARCHITECTURES EXCLUDE REGEX "^${CMAKE_MATCH_1}[af]?(-|$)")
  endforeach()
  list(APPEND DEEP_MOE_CUDA_DEFINITIONS "DEEP_MOE_DISABLE_SM90_FEATURES=${values}")
endif()
if(DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS MATCHES "^(1|ON)$")
  list(APPEND DEEP_MOE_CUDA_DEFINITIONS DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS)
elseif(NOT DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS MATCHES "^(|0|OFF)$")
  message(FATAL_ERROR "DISABLE_AGGRESSIVE_PTX_INSTRS is '${DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS}'; allowed: 0, 1")
endif()
