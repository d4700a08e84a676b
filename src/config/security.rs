//! Sections `tls` and `auth`: the files of certificates and tokens, and whether calls for administrators are
//! on.

use std::path::PathBuf;

use super::layers::Layers;
use super::{Config, ConfigError, ServerConfig};

impl Config {
    /// A warning that everyone who reaches the server may change its models. Only the commands that are about
    /// `serve` show it, because others run with the same environment, for example in a container.
    #[must_use]
    pub(crate) fn open_administration(&self) -> Option<String> {
        let closed =
            self.auth.admin.is_some() || self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let address = self.server.grpc;
        (self.server.admin && !closed && !address.ip().is_loopback()).then(|| {
            format!(
                "server.admin: everyone who reaches {address} (server.grpc) can load and unload models and \
                 set labels: give auth.admin, or set it to off"
            )
        })
    }
}

/// The choices of a switch.
pub(super) const SWITCH: &[(&str, bool)] = &[("on", true), ("off", false)];

/// Section `tls`.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
    /// Whether the HTTP port uses TLS too.
    pub http: bool,
}

/// Section `auth`: files of tokens. `None`: the role needs no token.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthConfig {
    pub predict: Option<PathBuf>,
    pub admin: Option<PathBuf>,
    pub metrics: Option<PathBuf>,
}

const TOKENS: [&str; 3] = ["auth.predict", "auth.admin", "auth.metrics"];

impl Layers {
    /// `None` without `tls.certificate`.
    pub(super) fn tls(&self) -> Result<Option<TlsConfig>, ConfigError> {
        let http = self.choice("tls.http", SWITCH)?;
        for key in ["tls.key", "tls.client_ca"] {
            self.require(key, "tls.certificate")?;
        }
        if http {
            self.require("tls.http", "tls.certificate")?;
        }
        self.require("tls.certificate", "tls.key")?;
        let client_ca = self.path("tls.client_ca")?;
        let files = self.path("tls.certificate")?.zip(self.path("tls.key")?);
        Ok(files.map(|(certificate, key)| TlsConfig { certificate, key, client_ca, http }))
    }

    pub(super) fn auth(&self) -> Result<AuthConfig, ConfigError> {
        let [predict, admin, metrics] = TOKENS.map(|key| self.path(key));
        Ok(AuthConfig { predict: predict?, admin: admin?, metrics: metrics? })
    }

    /// Whether the calls of a switch are served. If any token is needed, they need one of `auth.admin`.
    pub(super) fn administration(&self, key: &'static str) -> Result<bool, ConfigError> {
        let tokens = TOKENS.iter().any(|tokens| self.text(tokens).is_some());
        let on = self.optional(key, |key| self.choice(key, SWITCH))?.unwrap_or(!tokens);
        if on && tokens {
            self.require(key, "auth.admin")?;
        }
        Ok(on)
    }

    /// Warns of tokens without use, and of tokens that can be read on the network.
    pub(super) fn warn_of_tokens(&mut self, server: &ServerConfig, tls: Option<&TlsConfig>) {
        if !server.admin && !server.reflection {
            self.warn_of_no_effect("auth.admin", "server.admin and server.reflection are off");
        }
        let grpc = tls.is_some() || server.grpc.ip().is_loopback();
        let http = tls.is_some_and(|tls| tls.http) || server.http.ip().is_loopback();
        for (key, secret, by) in [
            ("auth.predict", grpc, "tls.certificate is not given"),
            ("auth.admin", grpc, "tls.certificate is not given"),
            ("auth.metrics", http, "tls.http is off"),
        ] {
            if !secret && self.text(key).is_some() {
                self.warnings.push(format!("{key}: its tokens are not encrypted on the network: {by}"));
            }
        }
    }
}
