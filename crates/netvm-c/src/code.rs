//! What functions return, and the sentence that goes with it.

use std::ffi::{CStr, c_int};

use netvm::channel::ChannelError;
use netvm::error::Error;
use netvm::pager::PagerError;
use netvm::sync::{Refusal, SyncError};
use netvm_core::wire::Status;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $constant:literal, $text:literal;)*) => {
        /// What a function returns besides a number of its own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        pub enum Code {
            $($(#[$doc])* $name = $number,)*
        }

        impl Code {
            /// All of them, with their names in C.
            pub const ALL: &'static [(Code, &'static str)] = &[$((Code::$name, $constant),)*];

            /// The code with this number.
            pub fn from_number(number: c_int) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// What it means in general, without the facts of one case.
            pub fn text(self) -> &'static CStr {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// Well.
    Ok = 0, "NETVM_OK", c"success";
    /// Well, and ours, but whoever had it before died with it.
    Abandoned = 1, "NETVM_ABANDONED", c"acquired, but the holder before died: what it protects may be half done";
    /// Well, but something is pending, so the caller must not sleep.
    Pending = 2, "NETVM_PENDING", c"a notification is pending";
    /// The operation has not ended yet.
    UnderWay = 3, "NETVM_UNDER_WAY", c"the operation is under way";
    /// To a receiver: a sender has closed its end.
    Left = 4, "NETVM_SENDER_LEFT", c"a sender has closed its end of the channel";
    /// To a receiver: a sender has died.
    Lost = 5, "NETVM_SENDER_LOST", c"a sender has died, or its connection is lost";
    /// A NULL pointer, a bad number, a handle of another kind.
    Argument = -1, "NETVM_ERR_ARGUMENT", c"invalid argument";
    /// The handle belongs to a process that forked.
    Forked = -2, "NETVM_ERR_FORKED", c"handles of the parent process cannot be used after fork";
    /// A defect of netvm.
    Internal = -3, "NETVM_ERR_INTERNAL", c"internal error of netvm";
    /// No memory.
    NoMemory = -4, "NETVM_ERR_NO_MEMORY", c"out of memory";
    /// The operating system refused something.
    System = -5, "NETVM_ERR_SYSTEM", c"the operating system refused a request";
    /// An address that cannot be parsed.
    Address = -6, "NETVM_ERR_ADDRESS", c"invalid address";
    /// Nobody can listen there.
    Listen = -7, "NETVM_ERR_LISTEN", c"cannot listen at this address";
    /// No connection.
    Connect = -8, "NETVM_ERR_CONNECT", c"cannot connect";
    /// The other side does not follow the protocol.
    Protocol = -9, "NETVM_ERR_PROTOCOL", c"the peer does not speak the protocol of netvm";
    /// The other side speaks other versions.
    Version = -10, "NETVM_ERR_VERSION", c"the peer speaks another version of the protocol";
    /// The other side does not want us.
    Refused = -11, "NETVM_ERR_REFUSED", c"the peer refuses the connection";
    /// Secrets or encryption do not match.
    Security = -12, "NETVM_ERR_SECURITY", c"secrets or encryption do not match";
    /// No answer; the connection is given up.
    NoAnswer = -13, "NETVM_ERR_NO_ANSWER", c"the peer does not answer";
    /// The connection is gone, and the operation was certainly not executed in whole.
    PeerLost = -14, "NETVM_ERR_PEER_LOST", c"the connection to the peer is lost";
    /// The connection is gone, and nobody knows.
    OutcomeUnknown = -15, "NETVM_ERR_OUTCOME_UNKNOWN", c"the connection is lost, and the operation may or may not have been executed";
    /// Beyond the end.
    Bounds = -16, "NETVM_ERR_BOUNDS", c"out of bounds";
    /// Read-only.
    Rights = -17, "NETVM_ERR_RIGHTS", c"the rights of the segment do not allow this";
    /// No such name, or a wrong key.
    NoSegment = -18, "NETVM_ERR_NO_SEGMENT", c"no such segment, or the key is wrong";
    /// Not there any more.
    Gone = -19, "NETVM_ERR_GONE", c"the segment or object is not exported any more";
    /// Not a multiple of the width.
    Misaligned = -20, "NETVM_ERR_MISALIGNED", c"the offset is not a multiple of the width";
    /// All places are taken.
    Full = -21, "NETVM_ERR_FULL", c"a limit is reached";
    /// Not now.
    Busy = -22, "NETVM_ERR_BUSY", c"busy";
    /// The peer, or this version, does not offer it.
    Unsupported = -23, "NETVM_ERR_UNSUPPORTED", c"not supported";
    /// The peer cannot touch its own memory.
    Fault = -24, "NETVM_ERR_FAULT", c"the memory of the peer cannot be accessed";
    /// The caller's own time-out.
    TimedOut = -25, "NETVM_ERR_TIMED_OUT", c"timed out";
    /// A member of the group died.
    Broken = -26, "NETVM_ERR_BROKEN", c"a member of the group died or left";
    /// Released without being held.
    NotHeld = -27, "NETVM_ERR_NOT_HELD", c"not held";
    /// Something else has this name.
    Kind = -28, "NETVM_ERR_KIND", c"the object is of another kind";
    /// Members of a group do different things.
    Mismatch = -29, "NETVM_ERR_MISMATCH", c"members of the group do different things";
    /// Anything else: the message tells.
    Other = -30, "NETVM_ERR_OTHER", c"error";
    /// Another segment or object of the node has this name.
    NameTaken = -31, "NETVM_ERR_NAME_TAKEN", c"something else is exported under this name";
}

/// Why a function failed.
#[derive(Debug)]
pub struct Failure {
    /// What it returns.
    pub code: Code,
    /// What `netvm_last_error` says.
    pub message: String,
}

/// A result within this crate.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure with a sentence.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The caller's mistake.
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(Code::Argument, message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Address { .. } => Code::Address,
            Error::Connect { .. } => Code::Connect,
            Error::Listen { .. } => Code::Listen,
            Error::NotNetvm { .. } | Error::Protocol { .. } => Code::Protocol,
            Error::Version { .. } => Code::Version,
            Error::Refused { .. } => Code::Refused,
            Error::NeedsSecret { .. }
            | Error::WrongSecret { .. }
            | Error::NoSecret { .. }
            | Error::NoEncryption { .. } => Code::Security,
            Error::Timeout { .. } => Code::NoAnswer,
            Error::LenderFull { .. } => Code::Full,
            Error::LenderLost { .. } | Error::Cut { .. } => Code::PeerLost,
            Error::WouldBlock { .. } | Error::StillUsed { .. } => Code::Busy,
            Error::OutcomeUnknown { .. } => Code::OutcomeUnknown,
            Error::Op { code, .. } => status(*code),
            Error::Bounds { .. } => Code::Bounds,
            Error::NameTaken { .. } => Code::NameTaken,
            Error::Pager(error) => pager(error),
            Error::System { errno, .. } if errno.0 == libc::ENOMEM => Code::NoMemory,
            Error::System { .. } => Code::System,
            _ => Code::Other,
        };
        Self::new(code, error.to_string())
    }
}

fn pager(error: &PagerError) -> Code {
    match error {
        PagerError::Userfaultfd(_) => Code::System,
        PagerError::Reserve { .. } | PagerError::NoLocalMemory(_) => Code::NoMemory,
        PagerError::LocalTooSmall { .. }
        | PagerError::AreaFull { bytes: 0, .. }
        | PagerError::NoLender
        | PagerError::Replicas { .. }
        | PagerError::Erasure { .. }
        | PagerError::ReplicasOfParts
        | PagerError::FaultPath { .. }
        | PagerError::FrameDesign { .. }
        | PagerError::PageSize { .. }
        | PagerError::Cpu { .. }
        | PagerError::LocalTooLarge { .. }
        | PagerError::NotPinned { .. }
        | PagerError::NotABlock { .. }
        | PagerError::Alignment { .. }
        | PagerError::LenderTimeout { .. }
        | PagerError::AreaTooLarge { .. }
        | PagerError::AreaTooSmall { .. }
        | PagerError::Shards { .. }
        | PagerError::BudgetRange { .. } => Code::Argument,
        PagerError::PinnedTooMuch { .. } => Code::Full,
        PagerError::OutsideFarMemory { .. } => Code::Bounds,
        _ => Code::Other,
    }
}

fn status(status: Status) -> Code {
    match status {
        Status::OutOfBounds => Code::Bounds,
        Status::NoRights => Code::Rights,
        Status::NoSegment => Code::NoSegment,
        Status::NoHandle => Code::Gone,
        Status::Full => Code::Full,
        Status::Busy => Code::Busy,
        Status::Stopping => Code::PeerLost,
        Status::Fault | Status::Away => Code::Fault,
        Status::Misaligned => Code::Misaligned,
        Status::Ok | Status::BadRequest => Code::Protocol,
        // No such operation here, or an answer of a newer peer.
        _ => Code::Unsupported,
    }
}

impl From<ChannelError> for Failure {
    fn from(error: ChannelError) -> Self {
        let code = match &error {
            ChannelError::TimedOut => Code::TimedOut,
            ChannelError::WouldBlock => Code::Busy,
            ChannelError::TooLong { .. } => Code::Bounds,
            ChannelError::Closed => Code::Gone,
            ChannelError::Left { .. } => Code::Left,
            ChannelError::Lost { .. } => Code::Lost,
            ChannelError::Failed(error) => return error.clone().into(),
            _ => Code::Other,
        };
        Self::new(code, error.to_string())
    }
}

impl<G> From<SyncError<G>> for Failure {
    fn from(error: SyncError<G>) -> Self {
        let code = match &error {
            SyncError::Abandoned(_) => Code::Abandoned,
            SyncError::TimedOut => Code::TimedOut,
            SyncError::Busy => Code::Busy,
            SyncError::Broken => Code::Broken,
            SyncError::Refused(Refusal::WrongKind) => Code::Kind,
            SyncError::Refused(Refusal::NotHeld) => Code::NotHeld,
            SyncError::Refused(Refusal::Number) => Code::Bounds,
            SyncError::Refused(Refusal::Full) => Code::Full,
            SyncError::Refused(Refusal::InUse) => Code::Busy,
            SyncError::Refused(Refusal::Mismatch) => Code::Mismatch,
            SyncError::Refused(Refusal::Closed) => Code::Gone,
            SyncError::Failed(error) => return error.clone().into(),
            _ => Code::Other,
        };
        Self::new(code, error.to_string())
    }
}
