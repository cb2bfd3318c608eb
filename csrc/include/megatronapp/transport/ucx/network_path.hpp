#pragma once

#include <memory>
#include <utility>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/host/host_slots.hpp"
#include "megatronapp/transport/shm/remote_board.hpp"
#include "megatronapp/transport/ucx/worker.hpp"

namespace megatronapp::transport::ucx {

/// Messages to and from a rank on another node, in slots of host memory. Device memory needs slots that UCX registers
/// for the device (GPUDirect); this path has none, so that messages of a device are staged (`StagedPath`).
class NetworkPath final : public HostSlots {
  public:
    NetworkPath(std::shared_ptr<Worker> worker, std::shared_ptr<Link> link) noexcept
        : worker_(std::move(worker)), link_(std::move(link)) {}
    NetworkPath(const NetworkPath&) = delete;
    NetworkPath& operator=(const NetworkPath&) = delete;
    NetworkPath(NetworkPath&&) = delete;
    NetworkPath& operator=(NetworkPath&&) = delete;
    ~NetworkPath() override = default;

    [[nodiscard]] const char* name() const noexcept override { return "ucx"; }
    [[nodiscard]] const char* staged_name() const noexcept override { return "ucx through pinned memory"; }
    [[nodiscard]] std::uint64_t slots() const noexcept override { return link_->own().slots; }
    [[nodiscard]] std::uint64_t slot_bytes() const noexcept override { return link_->own().slot_bytes; }

    [[nodiscard]] bool starts_at_once() const noexcept override { return true; }
    void start(const StartedSend& started, CopySink& sink) noexcept override { worker_->send(*link_, started, sink); }
    [[nodiscard]] std::optional<std::uint32_t> next_returned() override { return link_->next_returned(); }

    [[nodiscard]] std::optional<Arrival> next_arrival() override { return link_->next_arrival(); }
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept override { return link_->slot_data(slot); }
    void give_back(std::uint32_t slot) noexcept override {
        link_->give_back(slot);
        worker_->tell(*link_, Kind::kReturned, body_of_returned(slot));
    }

    [[nodiscard]] std::span<std::byte> incoming() const noexcept override { return link_->memory(); }

    void abandon() noexcept override { worker_->leave(*link_); }
    void stop() noexcept override { link_->await_end(); }

  private:
    std::shared_ptr<Worker> worker_;
    std::shared_ptr<Link> link_;
};

/// What active messages have brought of a peer's board.
class NetworkBoard final : public RemoteBoard {
  public:
    NetworkBoard(std::shared_ptr<Worker> worker, std::shared_ptr<Link> link) noexcept
        : worker_(std::move(worker)), link_(std::move(link)) {}

    [[nodiscard]] Life life() const override { return link_->life(); }
    [[nodiscard]] std::string how_lost() const override { return link_->how_lost(); }
    [[nodiscard]] std::uint64_t word(std::uint32_t index) const override {
        if (index >= kProgressWords) {
            throw TransportError("progress word " + std::to_string(index) + " does not exist; use 0 to " +
                                 std::to_string(kProgressWords - 1));
        }
        return link_->word(index);
    }
    [[nodiscard]] bool follow(std::uint32_t /*own_rank*/) noexcept override { return true; }
    [[nodiscard]] std::optional<std::uint64_t> next_entry() override {
        const std::optional<std::uint64_t> entry = link_->next_entry();
        if (entry) {
            worker_->tell(*link_, Kind::kRead, body_of_read(link_->entries_read()));
        }
        return entry;
    }
    void ring_activity() noexcept override {}
    void ring_credits() noexcept override {}
    void word_published(std::uint32_t index, std::uint64_t value) noexcept override {
        worker_->tell(*link_, Kind::kWord, body_of(WordNews{index, value}));
    }
    void entry_appended(std::uint64_t value) noexcept override {
        worker_->tell(*link_, Kind::kEntry, body_of(EntryNews{appended_++, value}));
    }

  private:
    std::shared_ptr<Worker> worker_;
    std::shared_ptr<Link> link_;
    std::uint64_t appended_ = 0;
};

}  // namespace megatronapp::transport::ucx
