//! How the client reaches a server: address, certificates, and a token.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::anyhow;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use super::failure::{cause, explained, first_hint};
use super::status_text;
use crate::cli::InputError;
use crate::server::token_lines;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// While a call waits, the server is asked this often whether it is still there, and must answer in this
/// time. Some calls may take an hour.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Flags of a connection.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Connect {
    /// Address of the server: http://HOST:PORT, or https://HOST:PORT for TLS
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8001")]
    pub addr: String,
    /// PEM file with the authority of the server's certificate; without it those of the system are used
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file with a certificate to show to the server
    #[arg(long, value_name = "FILE", requires = "key")]
    certificate: Option<PathBuf>,
    /// PEM file with the private key of --certificate
    #[arg(long, value_name = "FILE", requires = "certificate")]
    key: Option<PathBuf>,
    /// File with a token to send: its first line that is neither empty nor a comment
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Connect {
    /// Connects.
    ///
    /// # Errors
    /// When a flag is wrong, or the server cannot be reached.
    pub(crate) async fn channel(&self) -> anyhow::Result<Channel> {
        let addr = &self.addr;
        let wrong =
            || InputError(anyhow!("--addr: expected http://HOST:PORT or https://HOST:PORT, got {addr:?}"));
        let uri: Uri = addr.parse().map_err(|_| wrong())?;
        let encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong().into()),
        };
        if uri.host().is_none_or(str::is_empty) {
            return Err(wrong().into());
        }
        let mut endpoint = Endpoint::from(uri)
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT);
        match encrypted {
            true => endpoint = endpoint.tls_config(self.tls()?).map_err(|error| self.wrong_files(&error))?,
            false => self.no_files_of_tls()?,
        }
        endpoint.connect().await.map_err(|error| self.unreachable(&error))
    }

    /// The error for files of TLS that are there and cannot be used.
    fn wrong_files(&self, error: &tonic::transport::Error) -> InputError {
        let given = [("--ca", &self.ca), ("--certificate", &self.certificate), ("--key", &self.key)];
        let given =
            given.iter().filter_map(|(flag, file)| Some(format!("{flag} {}", file.as_ref()?.display())));
        InputError(anyhow!("{}: {}", given.collect::<Vec<_>>().join(", "), cause(error, None)))
    }

    fn unreachable(&self, error: &tonic::transport::Error) -> anyhow::Error {
        anyhow!("{}: cannot connect: {}", self.addr, cause(error, None))
    }

    /// The status of the first call on a connection, with a hint if it has no answer.
    pub(crate) fn first_failed(&self, status: Status) -> Status {
        explained(status, Some(first_hint(self.addr.starts_with("https:"))))
    }

    /// The error of the only call on a connection. What the server refuses is the input's fault.
    pub(crate) fn failed_call(&self, status: Status) -> anyhow::Error {
        match status.code() {
            Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition => {
                InputError(anyhow!("{}", status.message().to_owned())).into()
            }
            _ => anyhow!("{}: {}", self.addr, status_text(&self.first_failed(status))),
        }
    }

    fn tls(&self) -> Result<ClientTlsConfig, InputError> {
        let tls = ClientTlsConfig::new().timeout(CONNECT_TIMEOUT);
        let tls = match &self.ca {
            Some(ca) => tls.ca_certificate(Certificate::from_pem(read("--ca", ca)?)),
            None => tls.with_native_roots(),
        };
        let Some((certificate, key)) = self.certificate.as_ref().zip(self.key.as_ref()) else {
            return Ok(tls);
        };
        Ok(tls.identity(Identity::from_pem(read("--certificate", certificate)?, read("--key", key)?)))
    }

    fn no_files_of_tls(&self) -> Result<(), InputError> {
        for (flag, file) in [("--ca", &self.ca), ("--certificate", &self.certificate)] {
            if file.is_some() {
                return Err(InputError(anyhow!(
                    "{flag}: needs --addr https://HOST:PORT, got {:?}",
                    self.addr
                )));
            }
        }
        Ok(())
    }

    /// The token of --token-file.
    ///
    /// # Errors
    /// When the file has none.
    pub(crate) fn token(&self) -> Result<Option<Token>, InputError> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let file = read("--token-file", path)?;
        let wrong = |reason: String| InputError(anyhow!("--token-file: {}: {reason}", path.display()));
        let token = token_lines(&file).map_err(wrong)?.next().unwrap_or_default();
        let text = [b"Bearer ", token].concat();
        let mut value = MetadataValue::try_from(text.as_slice()).map_err(|error| wrong(error.to_string()))?;
        // It is left out of logs.
        value.set_sensitive(true);
        Ok(Some(Token(value)))
    }
}

fn read(flag: &'static str, path: &Path) -> Result<Vec<u8>, InputError> {
    fs::read(path).map_err(|error| InputError(anyhow!("{flag}: {}: {error}", path.display())))
}

/// What a call sends to be let in.
#[derive(Clone)]
pub(crate) struct Token(MetadataValue<Ascii>);

impl Token {
    pub(crate) fn add_to<T>(&self, request: &mut Request<T>) {
        request.metadata_mut().insert("authorization", self.0.clone());
    }
}

/// How long a change of the served models may take: the hour that the server allows, in which versions are
/// opened and checked, after the minutes in which it may have to begin.
pub(crate) const CHANGE_TIMEOUT: Duration = Duration::from_secs(4000);

/// A call that the server ends after a time limit.
pub(crate) fn call<T>(message: T, timeout: Duration, token: Option<&Token>) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    token.iter().for_each(|token| token.add_to(&mut request));
    request
}
