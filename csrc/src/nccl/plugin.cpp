/// Plugin that NCCL loads where NCCL_PROFILER_PLUGIN is its path, and the functions that read what it has logged.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "megatronapp/nccl/profiler_interface.hpp"
#include "megatronapp/nccl/transfer_log.hpp"

namespace megatronapp::nccl {
namespace {

constexpr std::size_t kPending = 8192;
constexpr std::size_t kFinished = 65536;

/// Never destroyed: threads of NCCL may still call while the process exits.
TransferLog& transfer_log() {
    static auto* log = new TransferLog(kPending, kFinished);
    return *log;
}

Operation operation_of(std::string_view function) {
    if (function == "AllReduce") {
        return Operation::kAllReduce;
    }
    if (function == "ReduceScatter") {
        return Operation::kReduceScatter;
    }
    if (function == "AllGather") {
        return Operation::kAllGather;
    }
    if (function == "Broadcast") {
        return Operation::kBroadcast;
    }
    if (function == "Reduce") {
        return Operation::kReduce;
    }
    if (function == "Send") {
        return Operation::kSend;
    }
    return function == "Recv" ? Operation::kReceive : Operation::kOther;
}

/// Bytes of a type by its name, such as ncclBfloat16 and ncclFloat8e4m3.
std::uint64_t bytes_of(std::string_view datatype) {
    if (datatype.ends_with("64")) {
        return 8;
    }
    if (datatype.ends_with("32")) {
        return 4;
    }
    return datatype.ends_with("16") ? 2 : 1;
}

Result init(void** context, int* event_types, const char* /*name*/, std::uint64_t hash, int /*nodes*/, int ranks,
            int rank, Logger /*logger*/) {
    const auto peers = static_cast<std::size_t>(ranks);
    *context = new Communicator{.log = &transfer_log(),
                                .hash = hash,
                                .ranks = ranks,
                                .rank = rank,
                                .collectives = {},
                                .sent = std::vector<std::uint32_t>(peers),
                                .received = std::vector<std::uint32_t>(peers)};
    *event_types = kCollective | kPointToPoint | kKernelChannel;
    return kSuccess;
}

Result start_event(void* context, void** handle, EventDescription* event) {
    auto& communicator = *static_cast<Communicator*>(context);
    TransferLog& log = *communicator.log;
    *handle = nullptr;
    if (event->type == kCollective) {
        const CollectiveEvent& found = event->collective;
        *handle = log.begin(communicator, operation_of(found.function), found.count * bytes_of(found.datatype), -1,
                            found.channels);
    } else if (event->type == kPointToPoint) {
        const PointToPointEvent& found = event->point_to_point;
        *handle = log.begin(communicator, operation_of(found.function), found.count * bytes_of(found.datatype),
                            found.peer, found.channels);
    } else if (event->type == kKernelChannel && event->parent != nullptr) {
        auto* pending = static_cast<TransferLog::Pending*>(static_cast<TransferLog::Handle*>(event->parent));
        *handle = log.begin_channel(*pending, event->kernel_channel.timer_ns);
    }
    return kSuccess;
}

Result stop_event(void* handle) {
    auto* event = static_cast<TransferLog::Handle*>(handle);
    if (event == nullptr) {
        return kSuccess;
    }
    if (event->is_channel) {
        transfer_log().end_channel(*static_cast<TransferLog::Channel*>(event));
    } else {
        transfer_log().enqueued(*static_cast<TransferLog::Pending*>(event));
    }
    return kSuccess;
}

Result record_state(void* handle, int state, StateArguments* arguments) {
    auto* event = static_cast<TransferLog::Handle*>(handle);
    if (event != nullptr && event->is_channel && state == kKernelChannelStop && arguments != nullptr) {
        auto& channel = *static_cast<TransferLog::Channel*>(event);
        transfer_log().channel_ends_at(channel, arguments->kernel_channel.timer_ns);
    }
    return kSuccess;
}

Result finalize(void* context) {
    delete static_cast<Communicator*>(context);
    return kSuccess;
}

}  // namespace
}  // namespace megatronapp::nccl

extern "C" {

/// The symbol that NCCL looks for, by this name.
// NOLINTNEXTLINE(readability-identifier-naming)
__attribute__((visibility("default"))) megatronapp::nccl::Profiler ncclProfiler_v4 = {
    "megatronapp",
    megatronapp::nccl::init,
    megatronapp::nccl::start_event,
    megatronapp::nccl::stop_event,
    megatronapp::nccl::record_state,
    megatronapp::nccl::finalize,
};

/// Copies at most `capacity` finished operations of 64 bytes to `out` and returns their number.
__attribute__((visibility("default"))) std::uint64_t megatronapp_nccl_take(megatronapp::nccl::Transfer* out,
                                                                           std::uint64_t capacity) {
    return megatronapp::nccl::transfer_log().take({out, static_cast<std::size_t>(capacity)});
}

/// Writes the communicator of the newest operation of this size to `out`, and returns whether one was enqueued lately.
__attribute__((visibility("default"))) bool megatronapp_nccl_communicator(std::uint64_t bytes, std::uint64_t* out) {
    const auto found = megatronapp::nccl::transfer_log().communicator_of(bytes);
    *out = found.value_or(0);
    return found.has_value();
}

/// Returns how many operations are enqueued and not finished.
__attribute__((visibility("default"))) std::uint64_t megatronapp_nccl_in_flight() {
    return megatronapp::nccl::transfer_log().in_flight();
}

/// Returns how many operations were dropped because too many were pending, or finished and not taken, or because NCCL
/// has not reported when their kernels ran.
__attribute__((visibility("default"))) std::uint64_t megatronapp_nccl_dropped() {
    return megatronapp::nccl::transfer_log().dropped();
}
}
