# The Python module _C: a thin client of the library. Limited API from Python 3.12 on, a plain module before.
if(CMAKE_VERSION VERSION_LESS 3.26)
  message(FATAL_ERROR "DEEP_MOE_BUILD_PYTHON needs CMake 3.26 or newer (this is ${CMAKE_VERSION}): older ones cannot "
                      "build for Python's Limited API. 'pip install cmake' gives one.")
endif()
find_package(
  Python 3.10 REQUIRED
  COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_dir OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE nanobind_result)
if(NOT nanobind_result EQUAL 0)
  message(FATAL_ERROR "DEEP_MOE_BUILD_PYTHON needs nanobind in ${Python_EXECUTABLE}: pip install nanobind")
endif()
set(nanobind_ROOT "${nanobind_dir}")
find_package(nanobind CONFIG REQUIRED)

if(NOT DEEP_MOE_LIBRARY) # else that of cmake/Prefix.cmake
  set(DEEP_MOE_LIBRARY deep_moe::deep_moe)
endif()
file(GLOB python_sources CONFIGURE_DEPENDS cpp/python/*.cc)
if(DEEP_MOE_WITH_CUDA)
  list(FILTER python_sources EXCLUDE REGEX "_no_cuda\\.cc$")
else()
  list(FILTER python_sources EXCLUDE REGEX "/bench_rank\\.cc$")
endif()
nanobind_add_module(_C STABLE_ABI NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS NB_DOMAIN deep_moe ${python_sources})
target_link_libraries(_C PRIVATE ${DEEP_MOE_LIBRARY} deep_moe::layout deep_moe_own_flags)
if(DEEP_MOE_WITH_CUDA)
  target_include_directories(_C SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # What deep_moe._C.build_info() tells.
  foreach(kind CUDA SM90)
    string(REPLACE "-real" "" archs "${DEEP_MOE_${kind}_ARCHITECTURES}")
    list(JOIN archs "," archs)
    target_compile_definitions(_C PRIVATE "DEEP_MOE_${kind}_ARCHS=\"${archs}\"")
  endforeach()
  string(REGEX MATCH "^[0-9]+" cuda_major "${CMAKE_CUDA_COMPILER_VERSION}")
  target_compile_definitions(_C PRIVATE DEEP_MOE_CUDA_COMPILED=1 DEEP_MOE_CUDA_MAJOR=${cuda_major})
endif()
# Nothing of the archives (the CUDA runtime among them) is visible to other modules of the process.
set(exports "${PROJECT_SOURCE_DIR}/cmake/module.map")
target_link_options(_C PRIVATE "LINKER:--version-script=${exports}")
set_property(TARGET _C APPEND PROPERTY LINK_DEPENDS "${exports}")
install(TARGETS _C LIBRARY DESTINATION .)
