# find_package(spamm_torch 0.1): compatible are equal major and minor versions, not older than asked.
# The build has written the version to _built.json.
set(PACKAGE_VERSION "unknown")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/../../../_built.json")
  file(READ "${CMAKE_CURRENT_LIST_DIR}/../../../_built.json" _spamm_built)
  string(JSON PACKAGE_VERSION GET "${_spamm_built}" version)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _spamm_series "${PACKAGE_VERSION}")
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
  if("${PACKAGE_FIND_VERSION_MAJOR}.${PACKAGE_FIND_VERSION_MINOR}" VERSION_EQUAL _spamm_series
     AND NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
endif()
