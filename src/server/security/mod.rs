//! Who may connect and call: certificates (`tls.rs`) and tokens (`tokens.rs`) from files, which are read
//! again while the server runs (`files.rs`).
//!
//! [`Guard`] is around the chain of all gRPC services, so a refused call costs neither a message nor a place
//! (`guard.rs`). `web.rs` asks for a token on the HTTP port.

mod files;
mod guard;
mod tls;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use metrics::Gauge;
use tonic::codegen::http::HeaderMap;

use crate::config::{AuthConfig, ServerConfig, TlsConfig};
use crate::metrics::Metrics;
use files::Watched;
use tls::Tls;
use tokens::Tokens;

pub(crate) use files::Asker;
pub use files::FileError;
pub(crate) use guard::Guard;
pub(crate) use tokens::{Refusal, Role, lines as token_lines};

/// How often the files are read.
const CHECK: Duration = Duration::from_secs(2);

/// Reads all files once, as a start does, and returns what is wrong with them.
pub(crate) fn unusable_files(tls: Option<&TlsConfig>, auth: &AuthConfig) -> Vec<FileError> {
    let tls = tls.and_then(|tls| Watched::open(tls::files(tls), tls::read).err());
    tls.into_iter().chain(tokens::open(auth).filter_map(Result::err)).collect()
}

/// What secures the ports.
pub(crate) struct Security {
    tls: Option<Watched<Tls>>,
    /// Whether the HTTP port uses TLS.
    http: bool,
    expiry: Option<Gauge>,
    tokens: Tokens,
    /// Which calls are served at all.
    reflection: bool,
    admin: bool,
}

impl Security {
    /// Reads all files.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub(crate) fn open(
        server: &ServerConfig,
        tls: Option<&TlsConfig>,
        auth: &AuthConfig,
        metrics: &Metrics,
    ) -> Result<Self, FileError> {
        let security = Self {
            tls: tls.map(|tls| Watched::open(tls::files(tls), tls::read)).transpose()?,
            http: tls.is_some_and(|tls| tls.http),
            expiry: tls.map(|_| metrics.certificate_expiry()),
            tokens: Tokens::open(auth)?,
            reflection: server.reflection,
            admin: server.admin,
        };
        security.show_expiry();
        Ok(security)
    }

    fn show_expiry(&self) {
        if let (Some(tls), Some(gauge)) = (&self.tls, &self.expiry) {
            gauge.set(tls.value().expires.as_secs_f64());
        }
    }

    /// What a new connection of the gRPC port needs; `None`: it is not encrypted.
    pub(crate) fn grpc(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.tls.as_ref().map(|tls| tls.value().grpc.clone())
    }

    /// The same for the HTTP port.
    pub(crate) fn http(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.tls.as_ref().filter(|_| self.http).map(|tls| tls.value().http.clone())
    }

    /// # Errors
    /// When the role needs a token, and the headers do not have one of it.
    pub(crate) fn allow(&self, role: Role, headers: &HeaderMap) -> Result<(), Refusal> {
        self.tokens.allow(role, headers)
    }

    /// Reads the files again.
    pub(crate) fn check(&self, asker: Asker) {
        if self.tls.as_ref().and_then(|tls| tls.check(asker)).is_some() {
            self.show_expiry();
        }
        self.tokens.check(asker);
    }

    /// Reads the files again and again.
    pub(crate) async fn watch(self: Arc<Self>) {
        while self.tls.is_some() || self.tokens.are_needed() {
            tokio::time::sleep(CHECK).await;
            let security = self.clone();
            // It fails only when the runtime ends.
            let _ = tokio::task::spawn_blocking(move || security.check(Asker::Timer)).await;
        }
    }
}
