//! Far memory: more than this machine has.

use std::ffi::c_int;
use std::sync::Arc;

use netvm::memory::Memory;
use netvm::pager::{Pager, PagerConfig};

use crate::call::call;
use crate::code::{Failure, Result};
use crate::ffi::{In, Opaque, Options, OutHandle, Own, Ref, Text};
use crate::node::security;

/// `netvm_pager`. Its thread serves page faults as long as the process lives.
pub struct PagerHandle(Arc<Pager>);

impl Opaque for PagerHandle {
    const TAG: u32 = 0x6E76_4606;
    const NAME: &'static str = "pager";
}

/// `netvm_pager_options`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PagerOptions {
    size: usize,
    pub(crate) lenders: In<Text>,
    pub(crate) lender_count: usize,
    pub(crate) local_bytes: u64,
    pub(crate) area_bytes: u64,
    pub(crate) secret_file: Text,
    pub(crate) secret: In<[u8; 32]>,
    pub(crate) encryption: u32,
    pub(crate) replicas: u32,
}

impl Default for PagerOptions {
    fn default() -> Self {
        Self {
            size: 0,
            lenders: In::NULL,
            lender_count: 0,
            local_bytes: 0,
            area_bytes: 0,
            secret_file: Text::NULL,
            secret: In::NULL,
            encryption: 0,
            replicas: 0,
        }
    }
}

impl PagerOptions {
    fn config(&self) -> Result<PagerConfig> {
        let lenders = self.lenders.array(self.lender_count)?;
        let lenders: Result<Vec<String>> =
            lenders.iter().map(|lender| Ok(lender.get("address of a lender")?.to_owned())).collect();
        let usual = PagerConfig::default();
        let or_usual = |bytes: u64, usual: u64| if bytes == 0 { usual } else { bytes };
        Ok(PagerConfig {
            lenders: lenders?,
            replicas: self.replicas.max(1) as usize,
            local_bytes: or_usual(self.local_bytes, usual.local_bytes),
            area_bytes: or_usual(self.area_bytes, usual.area_bytes),
            security: security(self.secret_file, self.secret, self.encryption)?,
            ..usual
        })
    }
}

/// Starts a pager.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_start(options: Options<PagerOptions>, pager: OutHandle<PagerHandle>) -> c_int {
    call(|| pager.fill(|| Ok(PagerHandle(Pager::start(options.get()?.config()?)?))))
}

/// Lets go of it.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_close(pager: Own<PagerHandle>) -> c_int {
    call(|| pager.take().map(drop))
}

/// Zero far memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_far(
    pager: Ref<PagerHandle>,
    bytes: usize,
    memory: OutHandle<Memory>,
) -> c_int {
    call(|| {
        memory.fill(|| {
            if bytes == 0 {
                return Err(Failure::argument("memory cannot have 0 bytes"));
            }
            Ok(pager.get()?.0.allocate(bytes)?.into())
        })
    })
}
