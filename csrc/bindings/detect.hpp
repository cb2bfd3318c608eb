#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Adds the tests of the detector to the module.
void bind_detect(pybind11::module_& module);

}  // namespace megatronapp
