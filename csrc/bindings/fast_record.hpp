#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Gives the bound class RingWriter its `record` method, called without pybind11's dispatcher: a record is made some
/// hundred times a step in the training path, and the dispatcher costs several times the record itself.
void add_fast_record(pybind11::handle ring_writer_class);

}  // namespace megatronapp
