#include "megatronapp/transport/ucx/worker.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/quiet_threads.hpp"
#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/bell.hpp"

namespace megatronapp::transport::ucx {
namespace {

constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 12;
constexpr int kSleepMs = 25;
constexpr std::uint64_t kSpinNs = 20'000;          // between the last event and sleep
constexpr std::uint64_t kExaminedNs = 25'000'000;  // between two looks at all connections

/// Sets an option of UCX that the environment does not name.
void set_option(const Library& library, ConfigHandle* config, const char* name, const std::string& value) {
    const std::string variable = std::string("UCX_") + name;
    if (!value.empty() && std::getenv(variable.c_str()) == nullptr) {  // NOLINT(concurrency-mt-unsafe): only read
        library.config_modify(config, name, value.c_str());
    }
}

}  // namespace

Worker::Worker(WorkerSettings settings) : settings_(std::move(settings)), library_(&Library::load(settings_.library)) {
    const QuietThreads quiet;
    try {
        make_context();
        const WorkerParams params{.field_mask = kWorkerThreadMode,
                                  .thread_mode = ThreadMode::kSerialized,
                                  .cpu_mask = {},
                                  .events = 0,
                                  .user_data = nullptr,
                                  .event_fd = 0,
                                  .flags = 0};
        require(library_->worker_create(context_, &params, &worker_), "no worker can be made");
        require(library_->worker_get_efd(worker_, &progress_descriptor_), "its events cannot be waited for");
        AddressHandle* address = nullptr;
        std::size_t length = 0;
        require(library_->worker_get_address(worker_, &address, &length), "it has no address");
        const auto* bytes = reinterpret_cast<const std::byte*>(address);
        address_.assign(bytes, bytes + length);
        library_->worker_release_address(worker_, address);
        wake_descriptor_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (wake_descriptor_ < 0) {
            throw TransportError("no event descriptor is left; raise the limit of open files (ulimit -n)");
        }
    } catch (...) {
        release();
        throw;
    }
    loop_ = std::make_unique<Loop>(*library_, worker_, settings_.self, settings_.deadline_s, settings_.board);
}

void Worker::make_context() {
    ConfigHandle* config = nullptr;
    require(library_->config_read(nullptr, nullptr, &config), "its configuration cannot be read");
    // Ranks of one node use a path of their own, and messages are in host memory today.
    set_option(*library_, config, "TLS", "^self,shm,cuda,rocm,ze");
    set_option(*library_, config, "NET_DEVICES", settings_.devices);
    const ContextParams params{.field_mask = kParamsFeatures,
                               .features = kFeatureActiveMessages | kFeatureWakeup,
                               .request_size = 0,
                               .request_init = nullptr,
                               .request_cleanup = nullptr,
                               .tag_sender_mask = 0,
                               .mt_workers_shared = 0,
                               .estimated_num_eps = 0};
    const Status status = library_->init_version(kApiMajor, kApiMinor, &params, config, &context_);
    library_->config_release(config);
    require(status, "no network device" + (settings_.devices.empty() ? std::string() : " " + settings_.devices) +
                        " can be used (UCX_NET_DEVICES and UCX_TLS say which)");
}

void Worker::require(Status status, const std::string& what) const {
    if (status != Status::kOk) {
        throw TransportError("UCX " + library_->version + ": " + what + ": " + library_->status_string(status));
    }
}

Worker::~Worker() { stop(); }

void Worker::release() noexcept {
    if (worker_ != nullptr) {
        library_->worker_destroy(std::exchange(worker_, nullptr));
    }
    if (context_ != nullptr) {
        library_->cleanup(std::exchange(context_, nullptr));
    }
    if (wake_descriptor_ >= 0) {
        ::close(std::exchange(wake_descriptor_, -1));
    }
}

std::shared_ptr<Link> Worker::add(std::uint32_t peer, std::vector<std::byte> address, const Hello& own) {
    auto link = std::make_shared<Link>(peer, own);
    links_.push_back(link);
    loop_->add(link, std::move(address));
    return link;
}

void Worker::start() {
    const QuietThreads quiet;
    thread_ = std::thread([this] { run(); });
}

void Worker::await_connected(const std::function<void()>& while_waiting) {
    const std::uint64_t deadline_ns = deadline_after(settings_.deadline_s);
    SliceHook hook(while_waiting);
    for (const std::shared_ptr<Link>& link : links_) {
        while (true) {
            Bell& activity = settings_.board->activity;
            const std::uint32_t seen = activity.count.load(std::memory_order_seq_cst);
            if (link->connected()) {
                break;
            }
            if (monotonic_ns() >= deadline_ns) {
                std::ostringstream text;
                text << "rank " << link->peer() << ": not connected within " << settings_.deadline_s
                     << " s over the network; see its log, and check that the nodes reach each other by the device "
                     << (settings_.devices.empty() ? "that UCX chose" : settings_.devices) << " (UCX_NET_DEVICES)";
                throw TransferTimeoutError(text.str(), {link->peer(), std::nullopt, "connect", settings_.deadline_s});
            }
            wait(activity, seen, end_of_slice(deadline_ns));
            hook.call_if_due();
        }
    }
}

void Worker::send(const Link& link, const StartedSend& started, CopySink& sink) {
    {
        const std::lock_guard lock(mutex_);
        if (!stopped_) {
            orders_.push_back({.task = Order::Task::kSend, .peer = link.peer(), .started = started, .sink = &sink});
            wake();
            return;
        }
    }
    sink.failed(started, "this endpoint is closed");
}

void Worker::tell(const Link& link, Kind kind, const Body& body) {
    enqueue({.task = Order::Task::kTell, .peer = link.peer(), .kind = kind, .body = body});
}

void Worker::leave(const Link& link) { enqueue({.task = Order::Task::kLeave, .peer = link.peer()}); }

void Worker::enqueue(const Order& order) {
    const std::lock_guard lock(mutex_);
    if (!stopped_) {
        orders_.push_back(order);
        wake();
    }
}

/// Writes only to a thread that sleeps or is about to.
void Worker::wake() noexcept {
    if (asleep_.exchange(false, std::memory_order_seq_cst)) {
        const std::uint64_t one = 1;
        static_cast<void>(::write(wake_descriptor_, &one, sizeof(one)));
    }
}

void Worker::run() {
    loop_->start();
    std::uint64_t examined_ns = 0;
    std::uint64_t busy_ns = 0;
    bool leaving = false;
    while (!leaving || !loop_->left_all()) {
        {
            const std::lock_guard lock(mutex_);
            taken_.swap(orders_);
        }
        for (const Order& order : taken_) {
            loop_->carry_out(order);
        }
        const bool happened = loop_->progress() || !taken_.empty();
        taken_.clear();
        const std::uint64_t now_ns = monotonic_ns();
        if (now_ns - examined_ns > kExaminedNs || leaving) {
            examined_ns = now_ns;
            loop_->examine(now_ns);
        }
        if (stopping_.load(std::memory_order_acquire) && !leaving) {
            leaving = true;
            loop_->leave_all();
        }
        if (happened) {
            busy_ns = now_ns;
        } else if (now_ns - busy_ns > kSpinNs) {
            sleep();
        }
    }
}

void Worker::sleep() {
    asleep_.store(true, std::memory_order_seq_cst);
    bool ordered = false;
    {
        const std::lock_guard lock(mutex_);
        ordered = !orders_.empty();
    }
    if (!ordered && library_->worker_arm(worker_) == Status::kOk) {
        std::array<pollfd, 2> events{{{.fd = progress_descriptor_, .events = POLLIN, .revents = 0},
                                      {.fd = wake_descriptor_, .events = POLLIN, .revents = 0}}};
        ::poll(events.data(), events.size(), kSleepMs);
    }
    asleep_.store(false, std::memory_order_seq_cst);
    std::uint64_t count = 0;
    static_cast<void>(::read(wake_descriptor_, &count, sizeof(count)));
}

void Worker::stop() {
    {
        const std::lock_guard lock(mutex_);
        if (stopped_) {
            return;
        }
        stopped_ = true;
    }
    if (thread_.joinable()) {
        stopping_.store(true, std::memory_order_release);
        wake();
        thread_.join();
    }
    release();
}

}  // namespace megatronapp::transport::ucx
