# DEEP_MOE_VERSION: read from pyproject.toml, the one place where the version is written.
# DEEP_MOE_ABI_VERSION: written here; see cmake/version.hpp.in.
set(DEEP_MOE_ABI_VERSION 1)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml")
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" version_line REGEX "^version = \"[0-9]+\\.[0-9]+\\.[0-9]+")
if(NOT version_line MATCHES "^version = \"([0-9]+\\.[0-9]+\\.[0-9]+)[^\";]*\"$")
  message(FATAL_ERROR "pyproject.toml: expected exactly one line 'version = \"X.Y.Z\"', found '${version_line}'")
endif()
set(DEEP_MOE_VERSION "${CMAKE_MATCH_1}")
