//! The third node of a copy: another process, started when it is first needed.

use std::error::Error;

use netvm::region::Region;

use super::partner::Side;
use super::{Link, Other};

/// Where bytes are copied to.
pub struct Third {
    link: Link,
    secret: Option<String>,
    cpu: Option<usize>,
    /// The region goes first, as the process waits for it.
    open: Option<(Region, Other)>,
}

impl Third {
    /// One on a CPU, that knows the secret which all share.
    pub fn new(link: Link, secret: Option<String>, cpu: Option<usize>) -> Self {
        Self { link, secret, cpu, open: None }
    }

    /// Its memory.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn region(&mut self, here: &Side) -> Result<&Region, Box<dyn Error>> {
        if self.open.is_none() {
            let mut other = Other::with_secret(self.link, self.secret.clone(), self.cpu)?;
            let region = here.connect(&other.ticket)?;
            other.partner.tell(&here.ticket)?;
            other.partner.line()?;
            self.open = Some((region, other));
        }
        self.open.as_ref().map(|(region, _)| region).ok_or_else(|| "no third node".into())
    }
}
