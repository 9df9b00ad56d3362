/*
 * netvm: network virtual memory for Linux.
 *
 * A node exports memory under a name and a key. Other processes, on this machine or others, connect to it, import the memory and
 * read, write and change it one-sidedly: the program behind it need not do anything. Locks, semaphores, barriers and the like work
 * the same way. netvm(7) explains the concepts, netvm(3) gives an overview; build with
 *
 *     cc program.c $(pkg-config --cflags --libs netvm)
 *
 * RESULTS   Every function that can fail returns an int: 0 (NETVM_OK) or a positive enum netvm_status for success, a negative one
 *           (NETVM_ERR_...) for failure. netvm_last_error() then has a sentence that names the peer and the cause. Results other than
 *           this int go through pointers, which are written only on success; but a place for a new handle becomes NULL on failure.
 *           NULL arguments, bad numbers, offsets beyond the end and handles of another kind are errors, not crashes.
 * HANDLES   Pointers to incomplete types. Whoever gets one closes it, once, with the function named beside its type; closing NULL
 *           does nothing. Closing one twice, or using it after or during its close, is a mistake like free() twice: it is
 *           reported as NETVM_ERR_ARGUMENT if the library can tell, and undefined otherwise. Handles may be closed in any order:
 *           what a node exports stays until it is unexported or the node destroyed, also when its netvm_memory has been freed.
 * POINTERS  Buffers, texts and structs belong to the caller. Unless said otherwise the library does not use them after the function
 *           has returned. Nobody else may change them during the call; exported memory is an exception, of course.
 * THREADS   Every function may be called by any thread, also with handles that other threads use at the same time, except for closing
 *           them. Operations of several threads on one peer share its connection. The library's own threads block all signals.
 * FORK      A child process must not use the handles of its parent: it gets NETVM_ERR_FORKED, and closing one does nothing (the
 *           memory stays taken until exec or exit). It may make nodes of its own. The check does not see a bare clone(CLONE_VM).
 *           The child keeps the sockets of its parent open until exec: peers see the parent's death only when both have gone.
 * UNITS     Lengths and offsets are in bytes, times in nanoseconds. Offsets count from the start of the segment.
 * TIME      timeout_ns: negative (NETVM_FOREVER) waits without limit, 0 does not wait. A peer that is silent for 4 s, although it has been
 *           asked for a sign of life, is given up in any case (netvm_node_keep_alive): NETVM_ERR_NO_ANSWER, NETVM_ERR_PEER_LOST.
 * LIBRARY   It must not be unloaded (dlclose does nothing). It handles no signal (but see netvm_memory_file) and does not end the process
 *           (but see netvm_pager_start). Its symbols have the version
 *           NETVM_0.1; the structs with a member `size` may grow, and older programs go on to work.
 */
#ifndef NETVM_H
#define NETVM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NETVM_API extern __attribute__((visibility("default")))

#define NETVM_VERSION_MAJOR 0
#define NETVM_VERSION_MINOR 1
#define NETVM_VERSION_PATCH 0

/* The version of the library in use, such as "0.1.0". Never NULL; static. */
NETVM_API const char *netvm_version(void);

/* ---- Limits ---- */

#define NETVM_NAME_BYTES_MAX 255        /* of a segment's or object's name, in UTF-8, without the zero byte */
#define NETVM_NOTIFICATIONS_MAX 65536   /* notification numbers of one segment */
#define NETVM_RAILS_MAX 16              /* connections to one peer */
#define NETVM_SECRET_BYTES 32
#define NETVM_KEY_TEXT_BYTES 33         /* of a key as text, with the zero byte */
#define NETVM_QUEUE_PLACES_MAX 4096     /* of each peer in a segment's queue of notifications */
#define NETVM_CONDITIONS_MAX 256        /* of one monitor */
#define NETVM_PARTIES_MAX 1024          /* of one group */
#define NETVM_REDUCE_MAX 512            /* numbers in one reduction */
#define NETVM_BROADCAST_BYTES_MAX 4096  /* in one broadcast */
#define NETVM_POST_BYTES_MAX 1048576    /* of one posted put or get */

#define NETVM_SENDERS_MAX 1024          /* of one receiver */
#define NETVM_CHANNEL_BYTES_MIN 256     /* of one ring */
#define NETVM_CHANNEL_BYTES_MAX 1073741824

#define NETVM_FOREVER INT64_C(-1)
#define NETVM_MICROSECONDS(n) ((int64_t)(n) * 1000)
#define NETVM_MILLISECONDS(n) ((int64_t)(n) * 1000000)
#define NETVM_SECONDS(n) ((int64_t)(n) * 1000000000)

/* ---- Results ---- */

enum netvm_status {
    NETVM_OK = 0,
    NETVM_ABANDONED = 1,            /* success; but whoever had it before died with it: what it protects may be half done */
    NETVM_PENDING = 2,              /* netvm_board_rearm: something is there already, do not sleep */
    NETVM_UNDER_WAY = 3,            /* netvm_op_test: it has not ended yet */
    NETVM_SENDER_LEFT = 4,          /* netvm_receive: a sender has closed its end, and all its messages have been received */
    NETVM_SENDER_LOST = 5,          /* the same of one that died or whose connection is lost */
    NETVM_ERR_ARGUMENT = -1,        /* NULL, a bad number, not UTF-8, a handle of another kind or closed */
    NETVM_ERR_FORKED = -2,          /* the handle belongs to the parent process */
    NETVM_ERR_INTERNAL = -3,        /* a defect of netvm; the handles involved should be closed */
    NETVM_ERR_NO_MEMORY = -4,
    NETVM_ERR_SYSTEM = -5,          /* a system call failed */
    NETVM_ERR_ADDRESS = -6,         /* the address cannot be parsed */
    NETVM_ERR_LISTEN = -7,          /* the address is taken, not ours, or on a network without a secret */
    NETVM_ERR_CONNECT = -8,         /* nobody there; again later may help */
    NETVM_ERR_PROTOCOL = -9,        /* the other side is not netvm, or breaks its protocol */
    NETVM_ERR_VERSION = -10,        /* the other side has another version of the protocol */
    NETVM_ERR_REFUSED = -11,        /* the other side does not want us */
    NETVM_ERR_SECURITY = -12,       /* no secret, another one, a bad secret file, or no agreement on encryption */
    NETVM_ERR_NO_ANSWER = -13,      /* the peer is silent; the connection has been given up */
    NETVM_ERR_PEER_LOST = -14,      /* the connection is gone: connect and import again */
    NETVM_ERR_OUTCOME_UNKNOWN = -15,/* and the operation was executed once or not at all: nobody knows */
    NETVM_ERR_BOUNDS = -16,         /* an offset, length or number beyond the end */
    NETVM_ERR_RIGHTS = -17,         /* the segment is read-only */
    NETVM_ERR_NO_SEGMENT = -18,     /* no such name, or a wrong key: the peer does not tell which */
    NETVM_ERR_GONE = -19,           /* not exported any more */
    NETVM_ERR_MISALIGNED = -20,     /* an atomic's offset is not a multiple of its width */
    NETVM_ERR_FULL = -21,           /* a limit of the peer or of the connection is reached */
    NETVM_ERR_BUSY = -22,           /* not now: somebody else's turn (with timeout 0), another thread uses the handle, or too
                                       much is under way (with NETVM_DONT_WAIT) */
    NETVM_ERR_UNSUPPORTED = -23,    /* this version of the library, or the peer's, does not have it */
    NETVM_ERR_FAULT = -24,          /* the peer cannot touch its own memory */
    NETVM_ERR_TIMED_OUT = -25,      /* timeout_ns is over */
    NETVM_ERR_BROKEN = -26,         /* a member of the group has died or left: this meeting will not be */
    NETVM_ERR_NOT_HELD = -27,       /* released, but not acquired through this handle */
    NETVM_ERR_KIND = -28,           /* the name belongs to an object of another kind */
    NETVM_ERR_MISMATCH = -29,       /* members of the group do different things */
    NETVM_ERR_OTHER = -30,          /* netvm_last_error() tells */
    NETVM_ERR_NAME_TAKEN = -31      /* another segment or object of the node has this name */
};

/* What a status means in general. Never NULL, also for numbers that are none; static. */
NETVM_API const char *netvm_strerror(int status);

/* What went wrong in the calling thread's last call that failed; "" if none has. Never NULL. Valid until the thread's next call that
 * fails, or its end. */
NETVM_API const char *netvm_last_error(void);

/* ---- Types ---- */

typedef struct netvm_node netvm_node;             /* netvm_node_destroy */
typedef struct netvm_peer netvm_peer;             /* netvm_peer_close */
typedef struct netvm_memory netvm_memory;         /* netvm_memory_free */
typedef struct netvm_pager netvm_pager;           /* netvm_pager_close */
typedef struct netvm_region netvm_region;         /* netvm_region_close */
typedef struct netvm_op netvm_op;                 /* netvm_op_close */
typedef struct netvm_counter netvm_counter;       /* netvm_counter_close */
typedef struct netvm_board netvm_board;           /* netvm_board_close */
typedef struct netvm_receiver netvm_receiver;     /* netvm_receiver_close */
typedef struct netvm_sender netvm_sender;         /* netvm_sender_close */
typedef struct netvm_lock netvm_lock;             /* netvm_lock_close */
typedef struct netvm_rwlock netvm_rwlock;         /* netvm_rwlock_close */
typedef struct netvm_semaphore netvm_semaphore;   /* netvm_semaphore_close */
typedef struct netvm_monitor netvm_monitor;       /* netvm_monitor_close */
typedef struct netvm_wait_queue netvm_wait_queue; /* netvm_wait_queue_close */
typedef struct netvm_waiting netvm_waiting;       /* netvm_waiting_wait or netvm_waiting_close */
typedef struct netvm_group netvm_group;           /* netvm_group_leave */

/* Whoever has a segment's key and reaches its node may use it. Hand it over on a way that is as secret as the memory. */
typedef struct netvm_key {
    uint8_t bytes[16];
} netvm_key;

/* 32 hexadecimal digits and a zero byte. */
NETVM_API int netvm_key_to_text(const netvm_key *key, char text[NETVM_KEY_TEXT_BYTES]);
NETVM_API int netvm_key_from_text(const char *text, netvm_key *key);

/* ---- Nodes and peers ---- */

enum netvm_encryption {
    NETVM_ENCRYPT_IF_ASKED = 0, /* when the peer wants it */
    NETVM_ENCRYPT_ALWAYS = 1,   /* or no connection; needs a secret */
    NETVM_ENCRYPT_NEVER = 2
};

/* Begin with NETVM_NODE_OPTIONS_INIT, then set members. */
typedef struct netvm_node_options {
    size_t size;
    const char *secret_file; /* a file that only its owner can read (`netvm secret new FILE`); NULL: none */
    const uint8_t *secret;   /* or the NETVM_SECRET_BYTES themselves; NULL: none */
    uint32_t encryption;     /* enum netvm_encryption */
    uint32_t insecure;       /* 1: listen on networks without a secret */
} netvm_node_options;
#define NETVM_NODE_OPTIONS_INIT { sizeof(netvm_node_options), NULL, NULL, NETVM_ENCRYPT_IF_ASKED, 0 }

/* Starts a node: one thread that serves its peers. With a secret it talks only to nodes that know the same one.
 * `options` may be NULL.
 * NETVM_ERR_SECURITY for an unusable secret file; NETVM_ERR_SYSTEM when no thread or descriptor is left. */
NETVM_API int netvm_node_create(const netvm_node_options *options, netvm_node **node);

/* Ends all its connections, in both directions, and everything that it exports. Its peers, regions and so on stay to be closed; they
 * fail with NETVM_ERR_PEER_LOST. Not to be called in a handler (netvm_board_arm). */
NETVM_API int netvm_node_destroy(netvm_node *node);

/* Listens at "HOST:PORT" (port 0: any that is free) or "unix:/path"; several times at several addresses. The address with the real
 * port goes to the `actual_bytes` bytes at `actual`; none with 0 bytes. 64 are enough for an IP address, 128 for a unix socket.
 * NETVM_ERR_ADDRESS; NETVM_ERR_LISTEN, also for an address on a network without a secret (see `insecure`). */
NETVM_API int netvm_node_listen(netvm_node *node, const char *address, char *actual, size_t actual_bytes);

/* Serves peers in the calling thread, without sleeping: for programs that look at their memory for what peers write. Nobody has
 * to: the node's thread does it as well, but has to be woken first. */
NETVM_API int netvm_node_poll(netvm_node *node);

enum netvm_link {
    NETVM_LINK_AUTO = 0,  /* shared memory where it can be had, the connection otherwise; the environment variable NETVM_LINK (auto,
                             shm, socket, datagrams) can say more */
    NETVM_LINK_SHM = 1,   /* memory of a node on this host is mapped; what cannot be mapped cannot be imported */
    NETVM_LINK_SOCKET = 2, /* everything goes over the connection */
    NETVM_LINK_DATAGRAMS = 3 /* and reads of far pages by datagrams, where the lender answers them */
};

/* How this node finds peers that have failed without a word, stopped or cut off: one that has been silent for `interval_ns` is asked for
 * a sign of life, one that has been silent for `timeout_ns` has failed. At first 1 s and 4 s. At least 10 ms, and at least three
 * intervals: shorter times are made longer. Peers that die are found at once in any case. */
NETVM_API int netvm_node_keep_alive(netvm_node *node, int64_t interval_ns, int64_t timeout_ns);

/* For how long operations of peers wait for exported memory that is not there (paged out, or missing under a userfaultfd); then they fail
 * with NETVM_ERR_FAULT there. netvm_unexport and netvm_node_destroy wait for as long. At first 10 s; at least 1 ms. */
NETVM_API int netvm_node_page_limit(netvm_node *node, int64_t limit_ns);

typedef struct netvm_connect_options {
    size_t size;
    uint32_t rails; /* connections, 1 to NETVM_RAILS_MAX; 0: netvm chooses. More carry large transfers faster on fast networks, but
                       two puts to the same bytes keep their order only with a flush or fence between them */
    uint32_t link;  /* enum netvm_link */
    uint32_t reconnect;       /* 1: connect again when the connection has ended; see below */
    uint32_t reserved;        /* 0 */
    int64_t first_pause_ns;   /* after the first attempt that failed, twice as long after each further one; 0: 10 ms */
    int64_t longest_pause_ns; /* 0: 1 s */
    int64_t patience_ns;      /* whoever needs the peer waits for it so long at most; 0: 10 s */
} netvm_connect_options;
#define NETVM_CONNECT_OPTIONS_INIT { sizeof(netvm_connect_options), 0, NETVM_LINK_AUTO, 0, 0, 0, 0, 0 }

/*
 * RECONNECTING   The peer and its regions outlive connections: whoever uses them when the connection has ended connects anew, and
 * regions are opened again by name and key; a program that starts again exports with the key it had (netvm_export_keyed). What was
 * under way when the connection ended fails as always, and no operation is ever executed twice: when a connection has been made,
 * nothing of those before it will be executed. netvm_flush returns NETVM_ERR_OUTCOME_UNKNOWN, once, when puts were made in a
 * connection that ended without a flush: each of them may be there, in part, or not. netvm_post_flush returns it as well, and then
 * has posted nothing. Locks, channels and so on belong to the connection in which they were opened.
 */

/* Connects to the node that listens at `address`. `options` may be NULL.
 * NETVM_ERR_ADDRESS, _CONNECT, _PROTOCOL, _VERSION, _REFUSED, _SECURITY, _NO_ANSWER. */
NETVM_API int netvm_connect(netvm_node *node, const char *address, const netvm_connect_options *options, netvm_peer **peer);

/* The next peer that has connected to this node, over the connection that it has opened: two nodes that operate on each other's
 * memory need one connection, and are faster with one. NETVM_ERR_TIMED_OUT. */
NETVM_API int netvm_accept(netvm_node *node, int64_t timeout_ns, netvm_peer **peer);

/* Connects to a node of this process, be it the same one. */
NETVM_API int netvm_connect_local(netvm_node *node, netvm_node *other, netvm_peer **peer);

/* The connection ends with the last handle that uses it: the peer, its regions, locks and so on. One that was accepted stays until its
 * opener ends it. */
NETVM_API int netvm_peer_close(netvm_peer *peer);

/* ---- Memory and exports ---- */

enum netvm_rights {
    NETVM_READ = 1,
    NETVM_READ_WRITE = 3
};

enum netvm_memory_flags {
    NETVM_HUGE = 1,      /* of huge pages if the system has them: fewer page faults, never paged out */
    NETVM_HUGE_ONLY = 2, /* or not at all: NETVM_ERR_NO_MEMORY when vm.nr_hugepages leaves too few */
    NETVM_PRIVATE = 4    /* processes of this host do not map it: all their operations go over their connections */
};

/* At least `bytes` bytes of zero memory, page-aligned, whole pages. Peers on this host map it and use it without a system call.
 * It may be paged out like any other. `bytes` is 1 or more, `flags` 0 or one of enum netvm_memory_flags.
 * NETVM_ERR_NO_MEMORY. */
NETVM_API int netvm_memory_alloc(size_t bytes, uint32_t flags, netvm_memory **memory);

/* Who serves page faults of far memory. */
enum netvm_fault_path {
    NETVM_FAULTS_AUTO = 0,     /* one of the next two, by what it takes to wake a thread, which is measured */
    NETVM_FAULTS_THREAD = 1,   /* the pager's thread, wherever it is */
    NETVM_FAULTS_SAME_CPU = 2, /* the pager's thread, on the CPU of a thread that does nearly all the faulting */
    NETVM_FAULTS_SPIN = 3,     /* the pager's thread, looking, for a CPU of its own */
    NETVM_FAULTS_IN_THREAD = 4 /* the thread that faults, in a handler of SIGBUS: fastest. System calls fail with EFAULT where they meet a
                                * page that is not there, or write to one that has only been read since it came (netvm_far_pin it), so it cannot be exported; threads must not block SIGBUS; a handler of SIGBUS that the program sets
                                * later must call the one it replaces, with all signals blocked (sa_mask) and no SA_ONSTACK; threads
                                * need 64 KiB of their stacks for it; far memory must not be what malloc hands out */
};

/* Where far memory goes that is not local. */
enum netvm_tier {
    NETVM_TIER_AUTO = 0,   /* packed into local memory as far as this costs less than fetching it, as measured */
    NETVM_TIER_LENDER = 1, /* to the lenders */
    NETVM_TIER_PACKED = 2  /* packed into up to three quarters of local_bytes, what came first to the lenders */
};

/* Begin with NETVM_PAGER_OPTIONS_INIT, then set members. */
typedef struct netvm_pager_options {
    size_t size;
    const char *const *lenders; /* addresses, "HOST:PORT" or "unix:/path", of programs `netvm lend`, at least one */
    size_t lender_count;
    uint64_t local_bytes;    /* of far memory that are in this machine at a time, from 4 MiB to less than 512 GiB; 0: 256 MiB */
    uint64_t area_bytes;     /* of addresses, for all far memory of this pager, less than 16 TiB; 0: 1 TiB */
    const char *secret_file; /* as in netvm_node_options */
    const uint8_t *secret;
    uint32_t encryption;     /* enum netvm_encryption */
    uint32_t replicas;       /* how many lenders hold each page: up to 4, and to lender_count; 0: 1 */
    uint64_t local_bytes_max; /* how far netvm_pager_set_local may raise local_bytes, which takes 20 bytes for each 4096 at once; 0: not at all */
    uint32_t encrypt_pages;  /* 1: lenders get encrypted pages, under a key of this process */
    uint32_t erasure;        /* NETVM_ERASURE(k, m) instead of replicas: each page in k parts (2, 4 or 8), and m more (1 to 4) that are
                              * computed from them, on k + m lenders of which any m may be lost; 0: not in parts */
    const char *learn_file;  /* bring pages in by what the program did not only before, but also in the run that left this file (of shards: it, and
                              * others with numbers behind the name); NULL: only before */
    uint32_t fault_path;     /* enum netvm_fault_path */
    uint32_t page_bytes;     /* that come in together at a fault: a power of two from 4096 to 2097152, of which local_bytes holds four; 0: 4096 */
    uint32_t tier;           /* enum netvm_tier */
    uint32_t shards;         /* pagers that divide the far memory, up to 64, for programs of which many threads fault at once; local_bytes is at least
                              * 4 MiB for each, fault_path not NETVM_FAULTS_SAME_CPU; 0: 1 */
    int64_t lender_timeout_ns; /* how long a lender may take to answer before it is given up, 50 ms or more; where others have what it has, 0.7 s at most; 0: 4 s */
    const char *name;        /* under which the lenders list this process (`netvm status`), cut to NETVM_NAME_BYTES_MAX; NULL: the program's */
    uint32_t link;           /* enum netvm_link: whether lenders on this host are read and written without them; NETVM_LINK_SHM: all must be */
    uint32_t pinned;         /* 1: the pager's threads run on `cpu` alone; 0: where they are of most use */
    uint32_t cpu;            /* counted from 0, one that this process may use */
    uint32_t reserved;       /* 0 */
} netvm_pager_options;
#define NETVM_ERASURE(k, m) ((uint32_t)(k) << 8 | (uint32_t)(m))
#define NETVM_PAGER_OPTIONS_INIT { sizeof(netvm_pager_options), NULL, 0, 0, 0, NULL, NULL, NETVM_ENCRYPT_IF_ASKED, 0, 0, 0, 0, NULL, NETVM_FAULTS_AUTO, 0, NETVM_TIER_AUTO, 0, 0, NULL, NETVM_LINK_AUTO, 0, 0, 0 }

/* Starts a pager: a thread that borrows memory from others, and brings pages when they are touched. It goes on, with its connections,
 * until the handle has been closed and the last memory of it freed: make one. When a lender is lost whose pages no other has, what was there is lost with it, and the process
 * ends: at once, by SIGBUS, without a core dump, and with a sentence on standard error that names the lender.
 * NETVM_ERR_SYSTEM when the system does not allow userfaultfd (`netvm doctor` tells what helps), NETVM_ERR_NO_MEMORY, and as
 * netvm_connect. */
NETVM_API int netvm_pager_start(const netvm_pager_options *options, netvm_pager **pager);

/* Lets go of the handle. Memory stays until it is freed, by netvm_memory_free; with the last of it the pager ends, and its lenders have their memory
 * back. With blocks of netvm_far_alloc that have not been freed it goes on until the process ends. */
NETVM_API int netvm_pager_close(netvm_pager *pager);

/* The `bytes` bytes at `address`, which are the program's own: heap, stack, static or mapped. They stay where they are, mapped and (for
 * NETVM_READ_WRITE) writable, until the handle, all ranges of it and all exports of them have gone. */
NETVM_API int netvm_memory_register(void *address, size_t bytes, int rights, netvm_memory **memory);

/* All bytes that a file has now; `descriptor` may be closed afterwards. What peers put goes to the file. When the file is truncated,
 * accesses to what is gone fail with NETVM_ERR_FAULT; for this the library handles SIGBUS, and passes on what is not its own: a
 * program sets a handler of its own before, not afterwards. NETVM_ERR_SYSTEM for an empty file or one not open for `rights`. */
NETVM_API int netvm_memory_file(int descriptor, int rights, netvm_memory **memory);

/* As netvm_memory_alloc, of far memory: what does not fit the pager's local memory is at its lenders. Peers reach it over their
 * connections. The program uses it like any other; a child of a fork does not have it. NETVM_ERR_OTHER when no addresses are left. */
NETVM_API int netvm_memory_far(netvm_pager *pager, size_t bytes, netvm_memory **memory);

/* Blocks of far memory for what a program has many of: netvm_far_alloc gives at least `bytes` bytes, at a multiple of 16 and of `alignment` (0, or a
 * power of two), whose contents are anything. What the library knows of them is in local memory: no far page is touched to find one, or to give it
 * back. netvm_far_realloc keeps what fits of the contents; a block above 32 KiB grows by moving its pages, not their bytes; `block` may be NULL;
 * when this fails it stays, and so does what is in `resized`. netvm_far_free of NULL does nothing. Any thread may do so with any block; blocks stay when the pager's handle is closed.
 * NETVM_ERR_ARGUMENT for 0 bytes, other alignments, and what is no block, or no longer; NETVM_ERR_OTHER when no addresses are left. */
NETVM_API int netvm_far_alloc(netvm_pager *pager, size_t bytes, size_t alignment, void **block);
NETVM_API int netvm_far_realloc(netvm_pager *pager, const void *block, size_t bytes, void **resized);
NETVM_API int netvm_far_free(netvm_pager *pager, const void *block);

/* How many bytes of a block may be used: those that were asked for, or some more. */
NETVM_API int netvm_far_usable(netvm_pager *pager, const void *block, size_t *bytes);

/* Another local budget, in bytes, while the program runs; a smaller one holds when this returns, which may take a second where a lender does
 * not answer. NETVM_ERR_ARGUMENT below 4 MiB, below
 * what pins need, and above local_bytes_max; NETVM_ERR_OTHER where pages would have to leave, and lenders are lost. */
NETVM_API int netvm_pager_set_local(netvm_pager *pager, uint64_t bytes);

/* Writes what was wanted so far to learn_file, for the next run of the program, which is to allocate its far memory in the same order;
 * nothing without learn_file. NETVM_ERR_OTHER when it cannot be written: the record of the last run stays. */
NETVM_API int netvm_pager_keep_record(netvm_pager *pager);

/* For netvm_far_advise. */
enum netvm_far_advice {
    NETVM_FAR_NORMAL = 0,     /* nothing is known any more */
    NETVM_FAR_SEQUENTIAL = 1, /* from the first to the last: what comes next is fetched from the first fault on */
    NETVM_FAR_RANDOM = 2,     /* here and there: nothing is fetched that was not touched, but for the rest of page_bytes and what learn_file foretells */
    NETVM_FAR_WILL_NEED = 3,  /* begin to bring it in, as far as there is local memory that nobody uses */
    NETVM_FAR_WONT_NEED = 4,  /* it leaves before others, and keeps its contents */
    NETVM_FAR_DISCARD = 5     /* whole pages of it are zero from now on, and cost nothing */
};

/* How the `bytes` bytes at `address`, which are far memory of this pager, are going to be used. NETVM_ERR_BOUNDS elsewhere. */
NETVM_API int netvm_far_advise(netvm_pager *pager, const void *address, size_t bytes, int advice);

/* The `bytes` bytes at each of `count` addresses are going to be used soon, in this order, wherever each of them is: their pages come many at a
 * time, to where they are used without a fault. Does not wait for them. For what is looked up here and there and known a little before: the next
 * hundred or so probes of a hash join, the neighbours of a vertex. All that is named and not used yet should have room in half of the local memory.
 * What is no far memory of this pager is passed over. */
NETVM_API int netvm_far_will_need_each(netvm_pager *pager, const void *const *addresses, size_t count, size_t bytes);

/* Brings far memory in and keeps it in this machine, until netvm_far_unpin with the same numbers has been called as often, or the memory
 * is freed. NETVM_ERR_FULL when all pins together need more than three quarters of the budget; nothing is pinned then. What is given to a
 * pipe or a socket without a copy (vmsplice, MSG_ZEROCOPY) must be pinned until it has been read there. NETVM_ERR_ARGUMENT from the end of a
 * pin that has none. */
NETVM_API int netvm_far_pin(netvm_pager *pager, const void *address, size_t bytes);
NETVM_API int netvm_far_unpin(netvm_pager *pager, const void *address, size_t bytes);

typedef struct netvm_far_counts {
    uint64_t faults;           /* page faults served */
    uint64_t pages_in;         /* pages read from lenders */
    uint64_t pages_out;        /* pages written to lenders */
    uint64_t far_bytes;        /* that hold contents now, wherever they are */
    uint64_t local_bytes;      /* in use now */
    uint64_t local_bytes_peak; /* the most at any time */
    uint64_t pages_moved;      /* to other lenders, because theirs asked for its memory */
    uint64_t lenders_lost;     /* each time counted */
} netvm_far_counts;

/* What it did so far. */
NETVM_API int netvm_pager_query(netvm_pager *pager, netvm_far_counts *counts);

/* One of all the numbers that a pager keeps. */
typedef struct netvm_stat {
    const char *name;   /* "prefetch_hits"; both texts stay for ever */
    const char *help;   /* what it counts, in a sentence */
    uint64_t value;     /* bytes, pages of 4096 bytes, or times, whose names end with _ms, _us_peak or _ns */
    uint32_t gauge;     /* 1: how much there is now; 0: it only grows */
    uint32_t reserved;
} netvm_stat;

/* Up to `room` of them, always in the same order, and in `count` how many there are. `stats` may be NULL when `room` is 0.
 * What prefetch has covered is 1 - (faults - faults_without_io) / remote_reads, 0 if that is less, how right it was prefetch_hits / prefetched. */
NETVM_API int netvm_pager_stats(netvm_pager *pager, netvm_stat *stats, size_t room, size_t *count);

/* The one of that name. NETVM_ERR_ARGUMENT when there is none. */
NETVM_API int netvm_pager_stat(netvm_pager *pager, const char *name, uint64_t *value);

/* A lender of a pager. */
typedef struct netvm_lender_state {
    char address[256];      /* as it was named, cut if it is longer */
    char why_lost[256];     /* a sentence, cut if it is longer; "" while it is there */
    uint64_t held_bytes;    /* of pages that it holds, each copy and part counted */
    uint64_t read_bytes;    /* from it; this and the rest are 0 for the 32nd lender and those behind it */
    uint64_t written_bytes; /* to it */
    uint64_t reads;         /* that it answered, */
    uint64_t reads_ns;      /* and how long they took, all together */
    uint32_t lost;          /* 1: it was lost, and may come back, or it has left */
    uint32_t reserved;
} netvm_lender_state;

/* Up to `room` of them, in the order in which they were named, and in `count` how many there are. `states` may be NULL when `room` is 0. Ask now and
 * then: how often one was lost, or came back, netvm_pager_stat counts as "lenders_lost" and "lenders_back". */
NETVM_API int netvm_pager_lenders(netvm_pager *pager, netvm_lender_state *states, size_t room, size_t *count);

/* Who serves its faults, an enum netvm_fault_path: what NETVM_FAULTS_AUTO has become. */
NETVM_API int netvm_pager_fault_path(netvm_pager *pager, uint32_t *path);

/* The `bytes` bytes from `offset` on, as memory to be exported by itself. The same bytes may be exported many times, with different
 * names, keys and rights. */
NETVM_API int netvm_memory_range(netvm_memory *memory, size_t offset, size_t bytes, netvm_memory **range);

/* Where it is, and how long; either place may be NULL. Peers change exported memory at any time: read words that they change with
 * atomic loads, or after a notification or lock has said that they are done. */
NETVM_API int netvm_memory_query(netvm_memory *memory, void **address, size_t *bytes);

/* The address is invalid afterwards, unless ranges are left or the memory is exported: then it stays until that ends. */
NETVM_API int netvm_memory_free(netvm_memory *memory);

/* Lets whoever has the key reach all of `memory` under `name`, which nothing else of the node has. The key is random.
 * NETVM_ERR_NAME_TAKEN; NETVM_ERR_OTHER when too much is exported, or memory that cannot be written is exported for writing. */
NETVM_API int netvm_export(netvm_node *node, const char *name, netvm_memory *memory, int rights, netvm_key *key);

/* As netvm_export, with `numbers` notification numbers (0 to NETVM_NOTIFICATIONS_MAX), which peers signal and this process waits
 * for on the board. */
NETVM_API int netvm_export_notified(netvm_node *node, const char *name, netvm_memory *memory, int rights, uint32_t numbers,
                                    netvm_key *key, netvm_board **board);

/* As netvm_export_notified, with a key of the caller's: for programs that start again and are found by those who have it. Whoever can guess
 * it may use the memory: take random bytes, and keep them as a secret. `board` may be NULL. */
NETVM_API int netvm_export_keyed(netvm_node *node, const char *name, netvm_memory *memory, int rights, uint32_t numbers,
                                 const netvm_key *key, netvm_board **board);

/* When it has succeeded no peer reads or writes the memory (through this name) any more; transfers under way fail. Also ends locks and so
 * on that the node exports. NETVM_ERR_NO_SEGMENT when nothing has this name; NETVM_ERR_BUSY when somebody is in the middle of the memory,
 * after netvm_node_page_limit still, and waits for a page of it that does not come, or was stopped there: keep the memory, and call again. */
NETVM_API int netvm_unexport(netvm_node *node, const char *name);

/* A place in a segment. */
typedef struct netvm_location {
    uint64_t offset;
    char name[NETVM_NAME_BYTES_MAX + 1];
} netvm_location;

/* Which of the node's exports contain the byte at `address`. `count` gets how many; the first `room` of them are written to
 * `locations`, which may be NULL for 0. */
NETVM_API int netvm_node_find(netvm_node *node, const void *address, netvm_location *locations, size_t room, size_t *count);

/* The same for an address of the peer's process, among the segments that we have imported. It asks the peer. */
NETVM_API int netvm_peer_find(netvm_peer *peer, uint64_t address, netvm_location *locations, size_t room, size_t *count);

/* ---- Regions: the memory of a peer ---- */

/* Opens a peer's segment. NETVM_ERR_NO_SEGMENT for a wrong name or key. */
NETVM_API int netvm_import(netvm_peer *peer, const char *name, const netvm_key *key, netvm_region **region);
NETVM_API int netvm_region_close(netvm_region *region);

typedef struct netvm_region_info {
    uint64_t bytes;
    int rights;             /* enum netvm_rights */
    uint32_t notifications; /* numbers, from 0 on */
    char link[16];          /* what carries the operations: "tcp", "shm", "cma", ... */
} netvm_region_info;

NETVM_API int netvm_region_query(netvm_region *region, netvm_region_info *info);

/* Where the byte at `offset` is in the process that exports it. It asks the peer. */
NETVM_API int netvm_region_address(netvm_region *region, uint64_t offset, uint64_t *address);

/*
 * ORDER     Puts to one peer are applied in any order, but a get, an atomic and a notification see all puts that were made before
 *           them by the same process through the same peer. Those made by other threads: when their calls had returned.
 * WHEN      netvm_put returns when the buffer may be used again. The bytes are at the peer, and visible to everybody there, when
 *           netvm_flush has returned; a notification, atomic or get made afterwards implies the same.
 * LOST      What had not been flushed when a connection ends may have arrived, or not. netvm never repeats an operation.
 * ATOMIC    Puts and gets are copies: who reads while somebody writes may see some of both.
 * ERRORS    All below: NETVM_ERR_BOUNDS (nothing was done), _PEER_LOST, _NO_ANSWER. Gets and atomics, and flush for the puts before
 *           it: _RIGHTS, _GONE, _FAULT.
 */

/* Writes `bytes` bytes, of any number, to `offset`. */
NETVM_API int netvm_put(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes);

/* Reads `bytes` bytes at `offset`. */
NETVM_API int netvm_get(netvm_region *region, uint64_t offset, void *buffer, size_t bytes);

/* A piece of a transfer: `bytes` bytes between `buffer` here and `offset` there. */
typedef struct netvm_iov {
    uint64_t offset;
    void *buffer; /* not written to by netvm_putv */
    size_t bytes;
} netvm_iov;

/* Write and read `count` pieces, all under way at once. When one is out of bounds nothing is done; when one fails otherwise the
 * others are moved all the same, and the first failure is returned. */
NETVM_API int netvm_putv(netvm_region *region, const netvm_iov *iov, size_t count);
NETVM_API int netvm_getv(netvm_region *region, const netvm_iov *iov, size_t count);

/* Returns when all puts so far through this region's peer are in its memory. Also tells of those that the peer refused. */
NETVM_API int netvm_flush(netvm_region *region);

/* netvm_put and netvm_flush, in one message where they fit one. */
NETVM_API int netvm_put_flush(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes);

/* What the owner of the memory is told: one more signal of the event count `number` (value 0), or the one-shot value `value`
 * under `number`, in place of the one before. */
typedef struct netvm_signal {
    uint32_t number;
    uint32_t value;
} netvm_signal;

/* netvm_put, and tells the peer when these bytes, and all put before, are there. `bytes` may be 0. */
NETVM_API int netvm_put_notify(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes, uint32_t number,
                               uint32_t value);

/* Only tells it. */
NETVM_API int netvm_notify(netvm_region *region, uint32_t number, uint32_t value);

/* Only tells it, at the end of the segment's queue (netvm_board_open_queue); `value` is not 0. Waits while we have no place free:
 * NETVM_ERR_BUSY after the time. NETVM_ERR_UNSUPPORTED when the segment has no queue. */
NETVM_API int netvm_enqueue(netvm_region *region, uint32_t number, uint32_t value, int64_t timeout_ns);

enum netvm_put_flags {
    NETVM_FENCE = 1, /* not applied before all puts made earlier through this peer */
    NETVM_QUEUE = 4  /* the signal goes to the end of the segment's queue; its value is not 0 */
};

/* With flags, and with a signal unless it is NULL. NETVM_ERR_BUSY (and nothing is put) when we have no place free in the queue. */
NETVM_API int netvm_put_with(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes, uint32_t flags,
                             const netvm_signal *signal);

/*
 * Atomics on words of 32 and 64 bits, at offsets that are multiples of their width. Executed by the peer's CPU: atomic with those of all
 * other processes, and with atomic accesses by the peer's own threads (<stdatomic.h>, or __atomic builtins); sequentially consistent.
 * The word is in the peer's byte order there, and in ours here. `old` gets what the word was before; it may be NULL, except for
 * compare_swap, which has exchanged if `old` is `expected`. When the connection ends meanwhile: NETVM_ERR_PEER_LOST if the
 * atomic was certainly not executed, NETVM_ERR_OUTCOME_UNKNOWN if nobody can tell. NETVM_ERR_MISALIGNED.
 */
NETVM_API int netvm_atomic_load_u32(netvm_region *region, uint64_t offset, uint32_t *value);
NETVM_API int netvm_atomic_store_u32(netvm_region *region, uint64_t offset, uint32_t value);
NETVM_API int netvm_atomic_swap_u32(netvm_region *region, uint64_t offset, uint32_t value, uint32_t *old);
NETVM_API int netvm_atomic_compare_swap_u32(netvm_region *region, uint64_t offset, uint32_t expected, uint32_t desired,
                                            uint32_t *old);
NETVM_API int netvm_atomic_fetch_add_u32(netvm_region *region, uint64_t offset, uint32_t operand, uint32_t *old);
NETVM_API int netvm_atomic_fetch_and_u32(netvm_region *region, uint64_t offset, uint32_t operand, uint32_t *old);
NETVM_API int netvm_atomic_fetch_or_u32(netvm_region *region, uint64_t offset, uint32_t operand, uint32_t *old);
NETVM_API int netvm_atomic_fetch_xor_u32(netvm_region *region, uint64_t offset, uint32_t operand, uint32_t *old);
NETVM_API int netvm_atomic_load_u64(netvm_region *region, uint64_t offset, uint64_t *value);
NETVM_API int netvm_atomic_store_u64(netvm_region *region, uint64_t offset, uint64_t value);
NETVM_API int netvm_atomic_swap_u64(netvm_region *region, uint64_t offset, uint64_t value, uint64_t *old);
NETVM_API int netvm_atomic_compare_swap_u64(netvm_region *region, uint64_t offset, uint64_t expected, uint64_t desired,
                                            uint64_t *old);
NETVM_API int netvm_atomic_fetch_add_u64(netvm_region *region, uint64_t offset, uint64_t operand, uint64_t *old);
NETVM_API int netvm_atomic_fetch_and_u64(netvm_region *region, uint64_t offset, uint64_t operand, uint64_t *old);
NETVM_API int netvm_atomic_fetch_or_u64(netvm_region *region, uint64_t offset, uint64_t operand, uint64_t *old);
NETVM_API int netvm_atomic_fetch_xor_u64(netvm_region *region, uint64_t offset, uint64_t operand, uint64_t *old);

/* ---- Operations that are posted now and end later ---- */

/*
 * BUFFERS   The library uses them until the operation has ended: its handle says so, or its counter's nothing is under way, or
 *           either has been closed. They must stay where they are, and what they contain is undefined meanwhile.
 * END       A get or atomic has ended when its answer is here, a put when its bytes may be changed again, a flush when all puts
 *           before it are at the peer.
 * ORDER     That of the blocking functions.
 * PROGRESS  By itself. Testing in a loop is served quickest.
 * ROOM      Posting waits when 256 operations, 4096 puts or 256 KiB of small puts are under way to a peer; with NETVM_DONT_WAIT it
 *           fails with NETVM_ERR_BUSY instead, and nothing is posted.
 *
 * Each is given a counter in `options`, or a place for its handle in `op`, and NULL for the other. `options` may be NULL.
 */
typedef struct netvm_post_options {
    size_t size;
    netvm_counter *counter;     /* counts the operation */
    const netvm_signal *signal; /* of a put, as in netvm_put_with; NULL: none */
    uint32_t flags;             /* NETVM_DONT_WAIT, NETVM_MORE; for a put NETVM_FENCE and NETVM_QUEUE */
    uint32_t reserved;          /* 0 */
} netvm_post_options;
#define NETVM_POST_OPTIONS_INIT { sizeof(netvm_post_options), NULL, NULL, 0, 0 }

enum netvm_post_flags {
    NETVM_DONT_WAIT = 2,
    NETVM_MORE = 8 /* another operation for this peer follows at once: they are sent together, at most 2 ms later */
};

/* At most NETVM_POST_BYTES_MAX bytes. */
NETVM_API int netvm_post_put(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes,
                             const netvm_post_options *options, netvm_op **op);
NETVM_API int netvm_post_get(netvm_region *region, uint64_t offset, void *buffer, size_t bytes,
                             const netvm_post_options *options, netvm_op **op);
NETVM_API int netvm_post_flush(netvm_region *region, const netvm_post_options *options, netvm_op **op);

/* Post `count` pieces, each of at most NETVM_POST_BYTES_MAX bytes, which are sent together: as many operations of the counter in
 * `options`, which they need. NETVM_FENCE comes before the first, a signal behind the last (of no pieces: by an operation of 0 bytes).
 * When one is out of bounds none is posted. `posted`, which may be NULL, gets how many were: with NETVM_DONT_WAIT and NETVM_ERR_BUSY
 * there was no room for the rest. */
NETVM_API int netvm_post_putv(netvm_region *region, const netvm_iov *iov, size_t count, const netvm_post_options *options,
                              size_t *posted);
NETVM_API int netvm_post_getv(netvm_region *region, const netvm_iov *iov, size_t count, const netvm_post_options *options,
                              size_t *posted);

enum netvm_atomic {
    NETVM_ATOMIC_LOAD = 1,
    NETVM_ATOMIC_SWAP = 2,
    NETVM_ATOMIC_COMPARE_SWAP = 3, /* the operand takes the place of `expected`; ignored by the others */
    NETVM_ATOMIC_ADD = 4,
    NETVM_ATOMIC_AND = 5,
    NETVM_ATOMIC_OR = 6,
    NETVM_ATOMIC_XOR = 7
};

NETVM_API int netvm_post_atomic_u32(netvm_region *region, uint64_t offset, int operation, uint32_t operand, uint32_t expected,
                                    const netvm_post_options *options, netvm_op **op);
NETVM_API int netvm_post_atomic_u64(netvm_region *region, uint64_t offset, int operation, uint64_t operand, uint64_t expected,
                                    const netvm_post_options *options, netvm_op **op);

/* NETVM_OK when it has ended well, and what the word was before an atomic in `old`, which may be NULL; NETVM_UNDER_WAY; or its error.
 * It may be called again. */
NETVM_API int netvm_op_test(netvm_op *op, uint64_t *old);

/* Waits for its end, and returns as netvm_op_test. With NETVM_ERR_TIMED_OUT it goes on. */
NETVM_API int netvm_op_wait(netvm_op *op, int64_t timeout_ns, uint64_t *old);

/* Waits for its end, if nobody has, and does not tell how that was. */
NETVM_API int netvm_op_close(netvm_op *op);

/* Counts operations, of any number of peers. */
NETVM_API int netvm_counter_create(netvm_counter **counter);

typedef struct netvm_counts {
    uint64_t posted; /* since the counter was made */
    uint64_t done;   /* ended well */
    uint64_t failed; /* the others are under way */
} netvm_counts;

NETVM_API int netvm_counter_test(netvm_counter *counter, netvm_counts *counts);

/* Waits until so many have ended well since the counter was made. The first failure, as soon as there is one, until it is taken. */
NETVM_API int netvm_counter_wait(netvm_counter *counter, uint64_t operations, int64_t timeout_ns);

/* Waits until nothing is under way. The first failure then, until it is taken. */
NETVM_API int netvm_counter_wait_all(netvm_counter *counter, int64_t timeout_ns);

/* Returns the first failure since the last call, with its message, or 0; waiting goes on without it. */
NETVM_API int netvm_counter_take_error(netvm_counter *counter);

/* Waits until nothing is under way, and does not tell how that ended. */
NETVM_API int netvm_counter_close(netvm_counter *counter);

/* ---- Copies from one peer to another ---- */

enum netvm_copied {
    NETVM_COPIED_LOCALLY = 1, /* within one peer */
    NETVM_COPIED_PUSHED = 2,  /* the source's node wrote to the target */
    NETVM_COPIED_PULLED = 3,  /* the target's node read from the source */
    NETVM_COPIED_THROUGH = 4  /* the bytes came here and went on */
};

/* Copies `bytes` bytes, if possible without their coming here; they are there when it returns. Sees all puts made before through
 * `from`'s peer, and comes after those through `to`'s. Ranges of one peer may overlap. One peer may be told address, name and key of
 * the other's segment. `way` gets an enum netvm_copied; it may be NULL. NETVM_ERR_RIGHTS, _GONE, _PEER_LOST of either peer;
 * NETVM_ERR_OUTCOME_UNKNOWN when they lost each other: then any part of the bytes is there. */
NETVM_API int netvm_copy(netvm_region *from, uint64_t offset, netvm_region *to, uint64_t to_offset, uint64_t bytes, int *way);

/* Through this process: neither peer learns of the other. The ranges must not overlap. */
NETVM_API int netvm_copy_through(netvm_region *from, uint64_t offset, netvm_region *to, uint64_t to_offset, uint64_t bytes);

/* Whom this node connects to when a peer asks it to copy to or from a third node. */
enum netvm_copies {
    NETVM_COPIES_NEVER = 0,
    NETVM_COPIES_KNOWN = 1,   /* nodes that its own program is connected to at that address; the default */
    NETVM_COPIES_ANYWHERE = 2 /* any that it has the secret for: whoever may import something here has it connect to any address */
};
NETVM_API int netvm_node_allow_copies(netvm_node *node, int copies);

/* ---- Boards: the notifications of memory that we export ---- */

/*
 * Each number has an event count (signals are counted, and taken by acknowledge) and a one-shot value (posted, taken by reset); a
 * program uses the one that fits. A number is pending while it has signals or a value. Whoever has seen a notification sees the
 * bytes that were put before it. Signals of processes that die afterwards stay. NETVM_ERR_BOUNDS for numbers that do not exist.
 */

/* How many numbers there are. */
NETVM_API int netvm_board_query(netvm_board *board, uint32_t *numbers);

/* Signals that nobody has acknowledged. */
NETVM_API int netvm_board_test(netvm_board *board, uint32_t number, uint64_t *signals);

/* The value posted, which stays; 0 if none is. */
NETVM_API int netvm_board_value(netvm_board *board, uint32_t number, uint32_t *value);

/* Waits until the number is pending, and takes nothing; first looks for a while if waits lately were short, then sleeps.
 * NETVM_ERR_TIMED_OUT. */
NETVM_API int netvm_board_wait(netvm_board *board, uint32_t number, int64_t timeout_ns);

/* As netvm_board_wait, and never sleeps: the quickest on a CPU of its own, a waste of it otherwise. */
NETVM_API int netvm_board_spin(netvm_board *board, uint32_t number, int64_t timeout_ns);

/* Waits until an event count has so many signals that nobody has acknowledged. */
NETVM_API int netvm_board_wait_count(netvm_board *board, uint32_t number, uint64_t signals, int64_t timeout_ns);

/* Waits until one of the `count` numbers from `first` on is pending, and tells which; they take turns. */
NETVM_API int netvm_board_wait_any(netvm_board *board, uint32_t first, uint32_t count, int64_t timeout_ns, uint32_t *number);

/* Takes up to `most` signals; `taken` gets how many, and may be NULL. Of several threads one gets each. */
NETVM_API int netvm_board_acknowledge(netvm_board *board, uint32_t number, uint64_t most, uint64_t *taken);

/* Takes the value posted; 0 if there is none. Of several threads one gets it. */
NETVM_API int netvm_board_reset(netvm_board *board, uint32_t number, uint32_t *value);

/* Notifies as a peer would. */
NETVM_API int netvm_board_notify(netvm_board *board, uint32_t number, uint32_t value);

/* A queue keeps each notification that is put into it, with its number and value, in order. Opening it gives each peer, and this process,
 * `places` places (1 to NETVM_QUEUE_PLACES_MAX); do so before the key is given away. NETVM_ERR_OTHER when it is open. */
NETVM_API int netvm_board_open_queue(netvm_board *board, uint32_t places);

/* Takes the first; NETVM_ERR_TIMED_OUT. Of several threads one gets each. */
NETVM_API int netvm_board_remove(netvm_board *board, int64_t timeout_ns, uint32_t *number, uint32_t *value);

/* How many are in the queue. */
NETVM_API int netvm_board_queued(netvm_board *board, size_t *queued);

/* Puts one in as a peer would; NETVM_ERR_BUSY when this process has no place free. */
NETVM_API int netvm_board_enqueue(netvm_board *board, uint32_t number, uint32_t value);

/* A descriptor for epoll, poll or select: readable after a notification that came after netvm_board_rearm, which must be called
 * first. One for all numbers, for one waiting thread. It belongs to the board: neither read it nor close it. */
NETVM_API int netvm_board_descriptor(netvm_board *board, int *descriptor);

/* Makes the descriptor unreadable until the next notification. NETVM_PENDING when one of the `count` numbers from `first` on is
 * pending already: take it, and do not sleep. */
NETVM_API int netvm_board_rearm(netvm_board *board, uint32_t first, uint32_t count);

/* Called once for each signal (value 0), each posted value and each notification in the queue, on a thread of the library's that all handlers of this board share.
 * It may call netvm, also to disarm itself. It must return: no exception, longjmp or pthread_exit. */
typedef void (*netvm_handler)(void *user, uint32_t number, uint32_t value);

/* Has `handler` called for a number, also for what is pending now; replaces the one before. Whoever acknowledges or resets the number
 * takes signals away from it. `user` is handed to it, and is the caller's. */
NETVM_API int netvm_board_arm(netvm_board *board, uint32_t number, netvm_handler handler, void *user);

/* When it returns the handler does not run and is not called again (called by the handler itself: this call is its last), so what
 * `user` points to may be freed. What it was not called for stays pending. Success also if there is none. */
NETVM_API int netvm_board_disarm(netvm_board *board, uint32_t number);

/* The segment stays exported. Disarm handlers first. */
NETVM_API int netvm_board_close(netvm_board *board);

/* ---- Channels: messages from other processes ---- */

/*
 * A sender writes its messages straight into the receiver's memory, where the receiver looks at them. Messages of one sender come in the
 * order in which they were sent; senders take turns. A sender for which there is no room waits, or is told so. Both ends are for
 * one thread at a time: NETVM_ERR_BUSY for a second one.
 */

/* Receives under `name`, which is shared with segments. With 1 to NETVM_SENDERS_MAX `senders` each has a ring of `bytes` bytes
 * (at least NETVM_CHANNEL_BYTES_MIN, at most _MAX): no round trips, and nobody waits for another; a message takes up to a quarter of its ring. With
 * 0 all share one ring, in the order in which they arrive or ask for room; a message takes up to half of it (above 4 KiB: a round trip). Whoever has the key
 * can spoil others' messages: senders that do not trust each other want a receiver each. */
NETVM_API int netvm_receiver_create(netvm_node *node, const char *name, uint32_t senders, size_t bytes, netvm_key *key,
                                    netvm_receiver **receiver);

typedef struct netvm_message {
    void *bytes;     /* where it arrived, aligned to 8; NULL for news of a sender */
    size_t length;
    uint32_t sender; /* number of the sender, unique among those that there are now */
    uint32_t reserved;
} netvm_message;

/* The next message, which stays in its place until the next call of netvm_receive or netvm_receiver_free. A sender that does not keep to
 * the rules can change it: copy first what is checked. NETVM_SENDER_LEFT and NETVM_SENDER_LOST tell of the end of a sender, once.
 * NETVM_ERR_TIMED_OUT. */
NETVM_API int netvm_receive(netvm_receiver *receiver, int64_t timeout_ns, netvm_message *message);

/* Gives the place of the last message back to its sender now, not with the next receive: senders may wait for it. */
NETVM_API int netvm_receiver_free(netvm_receiver *receiver);

/* A descriptor for epoll, poll or select, as netvm_board_descriptor: readable when something has come after netvm_receiver_rearm.
 * NETVM_PENDING: something may be there already. */
NETVM_API int netvm_receiver_descriptor(netvm_receiver *receiver, int *descriptor);
NETVM_API int netvm_receiver_rearm(netvm_receiver *receiver);

/* Ends the channel; senders are told. */
NETVM_API int netvm_receiver_close(netvm_receiver *receiver);

/* Becomes a sender. NETVM_ERR_NO_SEGMENT; NETVM_ERR_BUSY when there are as many senders as there can be. */
NETVM_API int netvm_sender_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_sender **sender);

/* The longest message that the channel takes. */
NETVM_API int netvm_sender_query(netvm_sender *sender, size_t *message_bytes_max);

/* Sends a message, which may be empty; the buffer may be used again when it returns. NETVM_ERR_TIMED_OUT, NETVM_ERR_BUSY (no room, with
 * timeout 0) and NETVM_ERR_BOUNDS (too long): nothing was sent. NETVM_ERR_GONE (the receiver has gone), NETVM_ERR_PEER_LOST: it may not
 * have been received. */
NETVM_API int netvm_send(netvm_sender *sender, const void *buffer, size_t bytes, int64_t timeout_ns);

typedef struct netvm_buffer {
    const void *bytes;
    size_t length;
} netvm_buffer;

/* Sends `count` messages in this order: where senders share a ring together or not at all, and at most half of
 * the ring; otherwise one after the other. */
NETVM_API int netvm_send_many(netvm_sender *sender, const netvm_buffer *messages, size_t count, int64_t timeout_ns);

/* Returns when the receiver's node has all messages; the sender is closed also when this fails. */
NETVM_API int netvm_sender_close(netvm_sender *sender);

/* ---- Synchronisation between processes ---- */

/*
 * The node that exports an object is its home, and decides whose turn it is, in the order of asking; the program behind it need do
 * nothing. A process at the home uses netvm_connect_local. Names are shared with segments. What a handle has is released through the
 * same handle, by any thread, or by closing it. A process that dies, or whose connection ends, gives back what it has, and the
 * next one gets it with NETVM_ABANDONED: it has it, but what it protects may be half done.
 *
 * Memory of the home that was put before a release, through the same peer, is seen by the next holder. That of other nodes wants a
 * flush first.
 *
 * With timeout 0 what others have is NETVM_ERR_BUSY; otherwise NETVM_ERR_TIMED_OUT, and then it is as if one had never asked.
 * NETVM_ERR_KIND for an object of another kind, NETVM_ERR_FULL for more than 1024 waits and possessions of one connection at once.
 */

enum netvm_release_flags {
    NETVM_CONFIRM = 1 /* return when the home has heard so, and tell errors: then the next one gets it as abandoned */
};

/* Lock: one at a time. Not recursive: a thread that waits for what it has waits for ever. */
NETVM_API int netvm_export_lock(netvm_node *node, const char *name, netvm_key *key);
NETVM_API int netvm_lock_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_lock **lock);
NETVM_API int netvm_lock_acquire(netvm_lock *lock, int64_t timeout_ns);
NETVM_API int netvm_lock_release(netvm_lock *lock, uint32_t flags);
NETVM_API int netvm_lock_close(netvm_lock *lock);

/* Reader-writer lock: many readers or one writer, who is not overtaken by later readers. Only a writer's death abandons it. */
NETVM_API int netvm_export_rwlock(netvm_node *node, const char *name, netvm_key *key);
NETVM_API int netvm_rwlock_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_rwlock **lock);
NETVM_API int netvm_rwlock_read(netvm_rwlock *lock, int64_t timeout_ns);
NETVM_API int netvm_rwlock_write(netvm_rwlock *lock, int64_t timeout_ns);
NETVM_API int netvm_rwlock_release(netvm_rwlock *lock, uint32_t flags);
NETVM_API int netvm_rwlock_close(netvm_rwlock *lock);

/* Counting semaphore. Permits that are acquired go back when they are released or the process dies; release names as many as
 * were acquired together. Permits that are consumed are gone, as with sem_wait, and add makes new ones, as sem_post: this counts
 * things, such as the items of a queue. `free_permits` gets how many are free then; it may be NULL. */
NETVM_API int netvm_export_semaphore(netvm_node *node, const char *name, uint32_t permits, netvm_key *key);
NETVM_API int netvm_semaphore_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_semaphore **semaphore);
NETVM_API int netvm_semaphore_acquire(netvm_semaphore *semaphore, uint32_t permits, int64_t timeout_ns);
NETVM_API int netvm_semaphore_release(netvm_semaphore *semaphore, uint32_t permits, uint32_t flags);
NETVM_API int netvm_semaphore_consume(netvm_semaphore *semaphore, uint32_t permits, int64_t timeout_ns);
NETVM_API int netvm_semaphore_add(netvm_semaphore *semaphore, uint32_t permits, uint64_t *free_permits);
NETVM_API int netvm_semaphore_close(netvm_semaphore *semaphore);

/* Monitor: a lock with `conditions` conditions (0 to NETVM_CONDITIONS_MAX), numbered from 0 on. Who is signalled queues like
 * everybody else, so what it waited for may have changed: look again, in a loop. `woken` gets how many were signalled; it may be NULL.
 * netvm_monitor_wait leaves, waits for a signal and comes back in: with success, with NETVM_ABANDONED (also inside, and somebody died
 * inside meanwhile), and with NETVM_ERR_TIMED_OUT (inside as well). With any other error it is outside. */
NETVM_API int netvm_export_monitor(netvm_node *node, const char *name, uint32_t conditions, netvm_key *key);
NETVM_API int netvm_monitor_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_monitor **monitor);
NETVM_API int netvm_monitor_enter(netvm_monitor *monitor, int64_t timeout_ns);
NETVM_API int netvm_monitor_exit(netvm_monitor *monitor, uint32_t flags);
NETVM_API int netvm_monitor_wait(netvm_monitor *monitor, uint32_t condition, int64_t timeout_ns);
NETVM_API int netvm_monitor_signal(netvm_monitor *monitor, uint32_t condition, uint64_t *woken);
NETVM_API int netvm_monitor_broadcast(netvm_monitor *monitor, uint32_t condition, uint64_t *woken);
NETVM_API int netvm_monitor_close(netvm_monitor *monitor);

/* Wait queue: processes wait until others wake them, first come, first served. Enqueue, then look at what you wait for, then wait
 * (or close, if it is there): a wake-up in between is not lost. netvm_waiting_wait closes `waiting`, whatever it returns;
 * netvm_waiting_close gives the place up, and passes on a wake-up that has come already. `woken` may be NULL. */
NETVM_API int netvm_export_wait_queue(netvm_node *node, const char *name, netvm_key *key);
NETVM_API int netvm_wait_queue_open(netvm_peer *peer, const char *name, const netvm_key *key, netvm_wait_queue **queue);
NETVM_API int netvm_wait_queue_enqueue(netvm_wait_queue *queue, netvm_waiting **waiting);
NETVM_API int netvm_waiting_wait(netvm_waiting *waiting, int64_t timeout_ns);
NETVM_API int netvm_waiting_close(netvm_waiting *waiting);
NETVM_API int netvm_wait_queue_wake(netvm_wait_queue *queue, uint32_t most, uint64_t *woken);
NETVM_API int netvm_wait_queue_close(netvm_wait_queue *queue);

/* Group: `parties` members (1 to NETVM_PARTIES_MAX) that meet, at a barrier, to reduce numbers or for a broadcast; all do the same at each
 * meeting. When a member dies, each of the others gets NETVM_ERR_BROKEN once, and then a new one can join. With NETVM_ERR_TIMED_OUT one
 * has not been there. A handle is one member: NETVM_ERR_BUSY for a second thread. */
NETVM_API int netvm_export_group(netvm_node *node, const char *name, uint32_t parties, netvm_key *key);
NETVM_API int netvm_group_join(netvm_peer *peer, const char *name, const netvm_key *key, netvm_group **group);
NETVM_API int netvm_group_leave(netvm_group *group);

/* Our rank, the least that was free, and how many meet; either may be NULL. */
NETVM_API int netvm_group_query(netvm_group *group, uint32_t *rank, uint32_t *parties);

NETVM_API int netvm_group_barrier(netvm_group *group, int64_t timeout_ns);

enum netvm_reduction {
    NETVM_SUM_U64 = 1, /* wraps around; the same for int64_t */
    NETVM_MIN_U64 = 2,
    NETVM_MAX_U64 = 3,
    NETVM_MIN_I64 = 4,
    NETVM_MAX_I64 = 5,
    NETVM_SUM_F64 = 6, /* in the order of ranks */
    NETVM_MIN_F64 = 7, /* NaN only if all are */
    NETVM_MAX_F64 = 8,
    NETVM_AND = 9,
    NETVM_OR = 10,
    NETVM_XOR = 11
};

/* Combines the `count` numbers of all members, place by place; all get the result in the place of their own. `numbers` is an array of
 * uint64_t, int64_t or double, as the reduction says; at most NETVM_REDUCE_MAX, and as many for each member. */
NETVM_API int netvm_group_reduce(netvm_group *group, int reduction, void *numbers, size_t count, int64_t timeout_ns);

/* The `bytes` bytes of the member with rank `root` to all; as many for each, at most NETVM_BROADCAST_BYTES_MAX. */
NETVM_API int netvm_group_broadcast(netvm_group *group, uint32_t root, void *buffer, size_t bytes, int64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
