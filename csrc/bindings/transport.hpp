#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Adds the transport's endpoint, messages and statistics to the module.
void bind_transport(pybind11::module_& module);

}  // namespace megatronapp
