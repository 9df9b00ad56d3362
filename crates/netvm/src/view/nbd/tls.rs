//! TLS as NBD has it: within the connection, once the client has asked for it.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use crate::error::{Error, Result};
use crate::link::{Caps, Incoming, Link, Outgoing, Stream};

/// A server's certificate and key, and who may connect.
#[derive(Clone)]
pub struct TlsFiles {
    config: Arc<ServerConfig>,
    checks_clients: bool,
}

impl std::fmt::Debug for TlsFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsFiles").finish_non_exhaustive()
    }
}

impl TlsFiles {
    /// Reads `server-cert.pem`, `server-key.pem` and, if it is there, `ca-cert.pem`, which clients' certificates are checked against.
    ///
    /// # Errors
    /// [`Error::Other`] naming the file that is missing or wrong.
    pub fn load(folder: &Path) -> Result<Self> {
        let wrong = |name: &str, reason: &dyn std::fmt::Display| {
            Error::Other(format!("cannot use {}: {reason}", folder.join(name).display()))
        };
        let (cert, key, ca) = ("server-cert.pem", "server-key.pem", "ca-cert.pem");
        let certificates = |name: &str| -> Result<Vec<CertificateDer<'static>>> {
            let found = CertificateDer::pem_file_iter(folder.join(name)).map_err(|e| wrong(name, &e))?;
            found.collect::<std::result::Result<_, _>>().map_err(|error| wrong(name, &error))
        };
        let private = PrivateKeyDer::from_pem_file(folder.join(key)).map_err(|error| wrong(key, &error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| wrong(cert, &error))?;
        let checks_clients = folder.join(ca).exists();
        let builder = if checks_clients {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(ca)? {
                roots.add(certificate).map_err(|error| wrong(ca, &error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| wrong(ca, &error))?)
        } else {
            builder.with_no_client_auth()
        };
        let config = builder.with_single_cert(certificates(cert)?, private);
        let config = Arc::new(config.map_err(|error| wrong(cert, &error))?);
        Ok(Self { config, checks_clients })
    }

    /// Whether clients must show a certificate.
    pub fn checks_clients(&self) -> bool {
        self.checks_clients
    }
}

/// A connection within TLS.
pub(super) struct Tls {
    stream: Stream,
    session: ServerConnection,
    /// Bytes on their way between records and their places.
    through: Box<[u8]>,
}

const THROUGH_BYTES: usize = 64 << 10;

impl Tls {
    pub(super) fn new(stream: Stream, files: &TlsFiles) -> io::Result<Self> {
        let session = ServerConnection::new(Arc::clone(&files.config)).map_err(io::Error::other)?;
        Ok(Self { stream, session, through: vec![0; THROUGH_BYTES].into() })
    }
}

/// A stream as the standard library reads and writes.
struct Plain<'a>(&'a Stream);

impl Read for Plain<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut into = Incoming::new();
        into.bytes(bytes);
        self.0.receive(&mut into)
    }
}

impl Write for Plain<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut pieces = Outgoing::new();
        pieces.bytes(bytes);
        self.0.send(&pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Link for Tls {
    fn caps(&self) -> Caps {
        Caps { name: "tls", remote: true }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.flush()?;
        let count = pieces.gather(0, &mut self.through)?;
        let written = self.session.writer().write(&self.through[..count])?;
        match self.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ if written == 0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(written),
        }
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let most = pieces.total_bytes().min(THROUGH_BYTES);
        loop {
            match self.session.reader().read(&mut self.through[..most]) {
                Ok(count) if count > 0 => return pieces.scatter(0, &self.through[..count]),
                Ok(_) => return Ok(0),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) => {}
            }
            if self.session.read_tls(&mut Plain(&self.stream))? == 0 {
                return Ok(0);
            }
            let processed = self.session.process_new_packets();
            // An alert, or the next part of the handshake.
            match self.flush() {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
            processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }

    fn has_unsent(&self) -> bool {
        self.session.wants_write()
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            self.session.write_tls(&mut Plain(&self.stream))?;
        }
        Ok(())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.stream.wait_fd()
    }
}
