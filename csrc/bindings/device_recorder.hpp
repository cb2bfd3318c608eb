#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Adds the recorder of spans of a CUDA stream to the module.
void bind_device_recorder(pybind11::module_& module);

}  // namespace megatronapp
