//! What programs are told when something is refused.

use netvm_core::files::Refused;

/// The number that says so.
pub(super) fn of(refused: Refused) -> i32 {
    match refused {
        Refused::NotFound => libc::ENOENT,
        Refused::Stale => libc::ESTALE,
        Refused::Exists => libc::EEXIST,
        Refused::NotFolder => libc::ENOTDIR,
        Refused::IsFolder => libc::EISDIR,
        Refused::NotEmpty => libc::ENOTEMPTY,
        Refused::NameTooLong => libc::ENAMETOOLONG,
        Refused::Invalid => libc::EINVAL,
        Refused::NoSpace => libc::ENOSPC,
        Refused::TooLong => libc::EFBIG,
        Refused::TooManyLinks => libc::EMLINK,
        Refused::NotPermitted => libc::EPERM,
    }
}

/// The same in words.
pub(super) fn describe(refused: Refused) -> String {
    crate::error::Errno(of(refused)).to_string()
}
