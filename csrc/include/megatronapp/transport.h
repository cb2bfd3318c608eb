/*
 * C interface of the transport between the ranks of a node: messages by key, in any order, through shared memory.
 * docs/adr/0021-transport-in-shared-memory.md describes it.
 *
 * Each rank creates its transport, adds its peers (who add it), and connects; all ranks do so at once. After that any
 * thread may call anything but `megatronapp_transport_destroy`. Functions return MEGATRONAPP_OK or what went wrong;
 * `megatronapp_transport_error` has the text. In a forked child only `destroy` may be called.
 */
#ifndef MEGATRONAPP_TRANSPORT_H
#define MEGATRONAPP_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MEGATRONAPP_API __attribute__((visibility("default")))
#else
#define MEGATRONAPP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum megatronapp_status {
    MEGATRONAPP_OK = 0,
    MEGATRONAPP_ERROR = 1,         /* wrong use, or what the system refused */
    MEGATRONAPP_MISMATCH = 2,      /* two ranks do not agree on slots, job, attempt, or version */
    MEGATRONAPP_CORRUPT = 3,       /* shared memory holds what no rank writes */
    MEGATRONAPP_DUPLICATE_KEY = 4, /* an earlier message of this key is not released yet */
    MEGATRONAPP_PEER_LOST = 5,     /* a peer died, or closed its transport */
    MEGATRONAPP_TIMEOUT = 6,       /* a peer did nothing within the deadline */
    MEGATRONAPP_NO_MEMORY = 7
};

typedef struct megatronapp_transport megatronapp_transport;

struct megatronapp_transport_options {
    const char* directory; /* of shared memory, the same for all ranks, such as /dev/shm */
    const char* job;       /* the same for all ranks of a run, and of no other run: letters, digits, '-' and '_' */
    uint64_t attempt;      /* of the job; files that older ones left are removed */
    uint32_t rank;
    uint64_t slot_bytes; /* the largest message */
    uint64_t slots;      /* messages from one rank to another that are not released yet; more wait at the sender */
    double deadline_s;   /* for peers to connect, and for a message to get a slot */
    uint32_t threads;    /* that copy */
};

/* A received message: a view of its slot, which may be written, and is valid until it is released. */
typedef struct megatronapp_message {
    void* data;
    uint64_t bytes;
    uint64_t key;
    uint32_t peer;      /* the sender */
    uint64_t queued_ns; /* when it was sent, and when its copy began and ended, on the monotonic clock */
    uint64_t start_ns;
    uint64_t end_ns;
} megatronapp_message;

/* Memory of a sender, and where it goes in a message. */
struct megatronapp_part {
    const void* data;
    uint64_t offset; /* of its first byte in the message */
    uint64_t bytes;
};

struct megatronapp_traffic {
    uint64_t transfers;
    uint64_t bytes;
    uint64_t copy_ns;
};

struct megatronapp_statistics {
    char path[32]; /* how messages reach the peer */
    struct megatronapp_traffic sent;
    struct megatronapp_traffic received;
};

/* The text of the last call of this thread that failed; valid until its next one. */
MEGATRONAPP_API const char* megatronapp_transport_error(void);

/* Makes the shared memory of this rank. */
MEGATRONAPP_API int megatronapp_transport_create(const struct megatronapp_transport_options* options,
                                                 megatronapp_transport** transport);

/* Makes room for the messages of a peer, before `connect`. */
MEGATRONAPP_API int megatronapp_transport_add_peer(megatronapp_transport* transport, uint32_t peer);

/* Waits until all peers have connected, too. A transport that cannot is closed. */
MEGATRONAPP_API int megatronapp_transport_connect(megatronapp_transport* transport);

/* Queues a message and returns. Its memory must stay as it is until `completed` has returned its ticket. A key belongs
 * to a message from one rank to another until that is released. `ticket` may be NULL. */
MEGATRONAPP_API int megatronapp_transport_send(megatronapp_transport* transport, uint32_t peer, uint64_t key,
                                               const void* data, uint64_t bytes, uint64_t* ticket);

/* Sends one message of `bytes` bytes that is gathered from parts, given in any order; otherwise as
 * `megatronapp_transport_send`. Parts must not overlap. Bytes that no part covers arrive with any value. */
MEGATRONAPP_API int megatronapp_transport_send_parts(megatronapp_transport* transport, uint32_t peer, uint64_t key,
                                                     const struct megatronapp_part* parts, size_t count, uint64_t bytes,
                                                     uint64_t* ticket);

/* Writes at most `capacity` tickets of sends whose memory is free again, each once: copied, or given up. */
MEGATRONAPP_API int megatronapp_transport_completed(megatronapp_transport* transport, uint64_t* tickets,
                                                    size_t capacity, size_t* count);

/* Sets `message` if it has arrived, and to NULL if it has not. */
MEGATRONAPP_API int megatronapp_transport_poll(megatronapp_transport* transport, uint32_t peer, uint64_t key,
                                               megatronapp_message** message);

/* Waits for a message, at most `deadline_s` seconds. */
MEGATRONAPP_API int megatronapp_transport_receive(megatronapp_transport* transport, uint32_t peer, uint64_t key,
                                                  double deadline_s, megatronapp_message** message);

/* Gives the slot back to the sender, who overwrites it. NULL is nothing; a message outlives its transport. */
MEGATRONAPP_API void megatronapp_message_release(megatronapp_message* message);

/* A number that changes with each message and each failure. Read it before polling. */
MEGATRONAPP_API int megatronapp_transport_activity(megatronapp_transport* transport, uint32_t* activity);

/* Waits until that number is not `seen`, at most `deadline_s` seconds; `changed` is then 0. */
MEGATRONAPP_API int megatronapp_transport_wait(megatronapp_transport* transport, uint32_t seen, double deadline_s,
                                               int* changed);

MEGATRONAPP_API int megatronapp_transport_statistics(megatronapp_transport* transport, uint32_t peer,
                                                     struct megatronapp_statistics* statistics);

/* Ends all threads; with `drain`, delivers first what was sent, within the deadline. May be called again. */
MEGATRONAPP_API int megatronapp_transport_close(megatronapp_transport* transport, int drain);

/* Closes without draining, and frees the handle; no other thread uses it any more. NULL is nothing. */
MEGATRONAPP_API void megatronapp_transport_destroy(megatronapp_transport* transport);

#ifdef __cplusplus
}
#endif

#endif
