//! What the kernel sees of a swap: three kinds of block devices.

use crate::cmd::ublk;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// By what a volume becomes a block device. The best comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// ublk_drv (Linux 6.5): nothing is allocated between the kernel and the server
    Ublk,
    /// nbd.ko, over a pair of sockets that may use the kernel's last memory
    Nbd,
    /// A loop device on a FUSE file: only where memory is limited by cgroups
    Loop,
}

impl By {
    /// What it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Loop => "loop",
        }
    }

    /// The wanted one if it is there, or else the best one.
    ///
    /// # Errors
    /// A sentence that says what is missing.
    pub fn choose(wanted: Option<Self>) -> Result<Self, String> {
        if let Some(by) = wanted {
            return by.check().map(|()| by);
        }
        let all = Self::value_variants();
        all.iter().copied().find(|by| by.check().is_ok()).ok_or_else(|| {
            let reasons: Vec<String> = all.iter().filter_map(|by| by.check().err()).collect();
            format!("this kernel has no block device that could be swap: {}", reasons.join("; "))
        })
    }

    fn check(self) -> Result<(), String> {
        let needed: &[(&str, &str)] = match self {
            Self::Ublk => &[ublk::CONTROL],
            Self::Nbd => {
                &[("/dev/nbd0", "no network block devices in this kernel (CONFIG_BLK_DEV_NBD; modprobe nbd)")]
            }
            Self::Loop => &[
                ("/dev/fuse", "no FUSE in this kernel (CONFIG_FUSE_FS; modprobe fuse)"),
                ("/dev/loop-control", "no loop devices in this kernel (CONFIG_BLK_DEV_LOOP; modprobe loop)"),
            ],
        };
        match needed.iter().find(|(path, _)| !Path::new(path).exists()) {
            Some((path, reason)) => return Err(format!("there is no {path}: {reason}")),
            None if self == Self::Ublk => {}
            None => return Ok(()),
        }
        match netvm::view::ublk::can_stay() {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err("ublk of this kernel has no devices that stay when their server is gone".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }
}
