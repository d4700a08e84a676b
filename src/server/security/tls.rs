//! The certificate of the ports, and the authorities of clients' certificates.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{Error, RootCertStore, ServerConfig};
use x509_cert::Certificate;
use x509_cert::der::Decode;

use super::files::{Contents, FileError, SettingFile};
use crate::config::TlsConfig;

/// What each port needs for a handshake.
pub(crate) struct Tls {
    pub grpc: Arc<ServerConfig>,
    pub http: Arc<ServerConfig>,
    /// The end of the certificate, since 1970.
    pub expires: Duration,
}

/// The files of [`read`], in its order.
pub(crate) fn files(config: &TlsConfig) -> Vec<SettingFile> {
    let file = |setting, path: &PathBuf| SettingFile { setting, path: path.clone() };
    let own = [file("tls.certificate", &config.certificate), file("tls.key", &config.key)];
    own.into_iter().chain(config.client_ca.iter().map(|path| file("tls.client_ca", path))).collect()
}

/// # Errors
/// When a file does not have what it should, the key does not match, or the certificate is not valid now.
pub(crate) fn read(files: &[Contents]) -> Result<Tls, FileError> {
    let (certificate, key, client_ca) = (&files[0], &files[1], files.get(2));
    let provider = Arc::new(ring::default_provider());
    let chain = certificates(certificate)?;
    let expires = valid_until(certificate, &chain[0])?;
    let private_key = PrivateKeyDer::from_pem_slice(&key.bytes)
        .map_err(|_| key.wrong("expected a private key in PEM form that is not encrypted"))?;
    let certified = CertifiedKey::from_der(chain, private_key, &provider).map_err(|error| match error {
        Error::InconsistentKeys(_) => key.wrong("the key does not match tls.certificate"),
        Error::InvalidCertificate(_) => certificate.wrong(format!("cannot be used: {error}")),
        // The texts of these errors have no part of the key.
        error => key.wrong(format!("cannot be used: {error}")),
    })?;
    let resolver = Arc::new(SingleCertAndKey::from(certified));
    let port = |clients: Option<Arc<dyn ClientCertVerifier>>, protocol: &[u8]| {
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| certificate.wrong(error.to_string()))?;
        let verifies = clients.is_some();
        let clients = clients.unwrap_or_else(|| Arc::new(NoClientAuth));
        let mut config = builder.with_client_cert_verifier(clients).with_cert_resolver(resolver.clone());
        config.alpn_protocols = vec![protocol.to_vec()];
        if verifies {
            // The certificate of a client that resumes is not verified again, and may have expired.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Arc::new(config))
    };
    let clients = client_ca.map(|file| clients(file, &provider)).transpose()?;
    Ok(Tls { grpc: port(clients, b"h2")?, http: port(None, b"http/1.1")?, expires })
}

/// The certificates of a file, at least one.
fn certificates(file: &Contents) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&file.bytes).collect();
    let certificates = certificates.ok().filter(|certificates| !certificates.is_empty());
    certificates.ok_or_else(|| file.wrong("expected a certificate in PEM form"))
}

/// The end of a certificate that is valid now, since 1970.
fn valid_until(file: &Contents, certificate: &CertificateDer<'_>) -> Result<Duration, FileError> {
    let certificate = Certificate::from_der(certificate)
        .map_err(|error| file.wrong(format!("the certificate is damaged: {error}")))?;
    let validity = certificate.tbs_certificate().validity();
    let (begin, end) = (validity.not_before, validity.not_after);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    if now < begin.to_unix_duration() {
        return Err(file.wrong(format!("the certificate is valid only from {}", begin.to_date_time())));
    }
    if now > end.to_unix_duration() {
        return Err(file.wrong(format!("the certificate has expired at {}", end.to_date_time())));
    }
    Ok(end.to_unix_duration())
}

/// What verifies the certificates of clients.
fn clients(
    file: &Contents,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, FileError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|error| file.wrong(format!("cannot be used: {error}")))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    verifier.map_err(|error| file.wrong(format!("cannot be used: {error}")))
}
