//! Every bound of the protocol, in one place, with the relations between them.

/// Newest version of the protocol that this crate speaks.
pub const VERSION: u16 = 2;
/// Oldest version that it still understands.
pub const VERSION_MIN: u16 = 2;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;

/// Most bytes that one write or read moves.
pub const PAYLOAD_BYTES_MAX: u32 = 1 << 20;
/// Most bytes of a write that is copied into the queue and needs no buffer afterwards.
pub const COPIED_BYTES_MAX: usize = 16 << 10;
/// Copied writes that follow each other are queued as one piece of at most so many bytes.
pub const BATCH_BYTES_MAX: usize = 64 << 10;
/// No further write is copied into a rail's queue of so many bytes.
pub const QUEUE_BYTES_MAX: usize = 256 << 10;
/// Most bytes of an atomic's body.
pub const INLINE_BYTES_MAX: usize = 16;
/// Bytes of an atomic's operand and comparand.
pub const ATOMIC_BYTES: usize = 16;
/// Most notification numbers of one segment: they have 16 bits on the wire.
pub const NOTIFICATIONS_MAX: u32 = 1 << 16;
/// Most places that one importer has in a segment's queue of notifications.
pub const QUEUE_PLACES_MAX: u32 = 4096;
/// Places that all importers of a segment together have in its queue.
pub const QUEUE_TOTAL_MAX: u64 = 1 << 18;
/// Most segments in whose queues one session has places.
pub const QUEUES_MAX: usize = 64;
/// Most pieces of local memory that one write or read touches.
pub const PIECES_MAX: usize = 256;
/// Most bytes in the body of a call, of its reply, or of an import.
pub const BODY_BYTES_MAX: usize = 64 << 10;
/// Most bytes in the name of a segment or of a borrower.
pub const NAME_BYTES_MAX: usize = 255;

/// Locks, semaphores and the like that one node exports.
pub const SYNC_OBJECTS_MAX: usize = 1024;
/// Tickets with which one session waits for or has something.
pub const TICKETS_MAX: usize = 1024;
/// Most conditions of one monitor.
pub const CONDITIONS_MAX: usize = 256;
/// Most members of one group.
pub const PARTIES_MAX: u32 = 1024;
/// Most bytes that one member contributes to a meeting.
pub const GROUP_BYTES_MAX: usize = 4096;

/// Most bytes that one request to copy to or from a third node moves.
pub const COPY_BYTES_MAX: u64 = 4 << 20;
/// Most bytes that one request to copy between two segments of the same peer moves: it is executed at once.
pub const COPY_LOCAL_BYTES_MAX: u64 = 256 << 10;
/// Sessions for which one node copies to and from third nodes at once.
pub const COPIERS_MAX: usize = 16;
/// Connections to third nodes that one such session keeps.
pub const COPY_PEERS_MAX: usize = 4;
/// Most bytes of a reason that a peer gives in words.
pub const REASON_BYTES_MAX: usize = 200;

/// Least bytes of a channel's ring.
pub const CHANNEL_BYTES_MIN: u64 = 256;
/// Most bytes of a channel's ring: positions are told in 29 bits, in units of 8 bytes.
pub const CHANNEL_BYTES_MAX: u64 = 1 << 30;
/// Most senders of one receiver.
pub const SENDERS_MAX: u32 = 1024;
/// Most bytes that a receiver's node holds of one sender's messages until the ring that all share has room.
pub const HELD_BYTES_MAX: u64 = 16 << 10;
/// Most bytes of messages that come with the request for their place.
pub const PUT_BYTES_MAX: u64 = HELD_BYTES_MAX / 4;
/// Most senders that one session opens.
pub const OUTLETS_MAX: usize = 1024;

/// Most files and folders of one file view.
pub const FILES_MAX: usize = 1 << 20;

/// Most bytes in one encrypted record.
pub const RECORD_BYTES_MAX: usize = 16 << 10;
/// Each direction's key is replaced after this many records: 64 GiB at most, well below what AES-GCM allows one key.
pub const REKEY_RECORDS: u64 = 1 << 20;

/// Most operations that wait for an answer in one session; more are refused by the poster (backpressure) and by the peer.
pub const OPS_MAX: usize = 256;
/// Most calls that wait for an answer in one session: calls have bodies.
pub const CALLS_MAX: usize = 16;
/// A session whose jobs (docs/design/nonresident.md) hold so many bytes receives no more before some are done. One receive may exceed
/// it, by a payload and a buffer for each rail.
pub const BOUNCE_BYTES_MAX: usize = 8 << 20;
/// With so many bytes held by all sessions of a node, each that holds any stops receiving.
pub const NODE_BOUNCE_BYTES_MAX: usize = 64 << 20;
/// What a job counts besides its bytes.
pub const JOB_BYTES: usize = 512;
/// Jobs of one session that are executed at once.
pub const JOBS_RUNNING_MAX: usize = 4;
/// Threads of one node that execute jobs.
pub const PAGERS_MAX: usize = 8;
/// Threads that wait for memory which nobody wants any more; with so many no new ones are started.
pub const PAGERS_LOST_MAX: usize = 64;
/// Copied answers of one session that wait to be sent; further reads that need one wait.
pub const KEPT_BYTES_MAX: usize = 8 << 20;

/// Sequence numbers of writes that may be under way at once in one session.
pub const WINDOW: u64 = 4096;
/// An acknowledgement is sent after this many writes when no other frame has carried one.
pub const ACKNOWLEDGE_EVERY: u64 = WINDOW / 4;
/// Most connections in one session.
pub const RAILS_MAX: usize = 16;
/// Most segments that one node exports.
pub const EXPORTS_MAX: usize = 4096;
/// Most segments that one session imports.
pub const IMPORTS_MAX: usize = 4096;
/// Most leases that one lender keeps at once, forks not yet claimed included.
pub const LEASES_MAX: usize = 4096;
/// Most forks of one lease that nobody has claimed yet.
pub const UNCLAIMED_MAX: usize = 16;
/// Most slabs that one lender has.
pub const SLABS_MAX: u64 = 1 << 20;
/// A slab is a multiple of so many bytes,
pub const SLAB_BYTES_MIN: u64 = 4096;
/// and has so many at most.
pub const SLAB_BYTES_MAX: u64 = 1 << 30;

/// A connection that has not said hello by then is closed, in milliseconds.
pub const HELLO_TIMEOUT_MS: u64 = 3000;
/// Most connections at once that have not said hello; one more, and the oldest of them is closed.
pub const HALF_OPEN_MAX: usize = 256;
/// A forked lease that nobody has claimed by then is dropped, in milliseconds.
pub const TICKET_TIMEOUT_MS: u64 = 10_000;

const _: () = assert!(WINDOW.is_multiple_of(64) && ACKNOWLEDGE_EVERY * 2 <= WINDOW);
const _: () = assert!(CALLS_MAX <= OPS_MAX && OPS_MAX <= u16::MAX as usize);
const _: () = assert!(NAME_BYTES_MAX + 64 <= BODY_BYTES_MAX && BODY_BYTES_MAX <= PAYLOAD_BYTES_MAX as usize);
const _: () = assert!(ATOMIC_BYTES <= INLINE_BYTES_MAX && INLINE_BYTES_MAX <= u8::MAX as usize);
const _: () =
    assert!(HEADER_BYTES + COPIED_BYTES_MAX <= BATCH_BYTES_MAX && BATCH_BYTES_MAX <= QUEUE_BYTES_MAX);
const _: () = assert!(SYNC_OBJECTS_MAX <= EXPORTS_MAX);
// Slots beyond a session's own tickets stand for the objects whose words it has; both are told as numbers of notifications.
const _: () = assert!(TICKETS_MAX + SYNC_OBJECTS_MAX <= NOTIFICATIONS_MAX as usize);
const _: () = assert!(GROUP_BYTES_MAX + 64 <= BODY_BYTES_MAX && PARTIES_MAX < 1 << 16);
const _: () = assert!(PUT_BYTES_MAX as usize + 64 <= BODY_BYTES_MAX);
const _: () = assert!(CHANNEL_BYTES_MAX / 8 < 1 << 29 && CHANNEL_BYTES_MIN >= 64);
const _: () = assert!(SENDERS_MAX <= NOTIFICATIONS_MAX && OUTLETS_MAX <= NOTIFICATIONS_MAX as usize);
const _: () = assert!(UNCLAIMED_MAX < LEASES_MAX);
const _: () = assert!(VERSION_MIN <= VERSION);
