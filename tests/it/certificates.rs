//! Certificates that a test makes, and clients that use them.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flechette::config::TlsConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// Signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its private key in PEM form.
pub struct Signed {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // With the name of its certificates, OpenSSL would take them for signed by themselves.
        params.distinguished_name.push(DnType::CommonName, "authority");
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for this machine, valid until the end of this year.
    pub fn sign(&self, until: i32) -> Signed {
        self.signed(|params| params.not_after = date_time_ymd(until, 12, 31))
    }

    /// A certificate for this machine that will expire soon.
    pub fn sign_for(&self, time: Duration) -> Signed {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        self.signed(|params| params.not_after = date_time_ymd(1970, 1, 1) + now + time)
    }

    fn signed(&self, valid: impl FnOnce(&mut CertificateParams)) -> Signed {
        let mut params = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        valid(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        Signed { certificate, key: key.serialize_pem() }
    }
}

/// A directory with the files of a server.
pub struct Files(tempfile::TempDir);

impl Files {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        // As a rename, so that a server reads the old or the new file.
        let new = self.path("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, &path).unwrap();
        path
    }

    /// Writes a certificate and its key.
    pub fn certificate(&self, signed: &Signed) -> TlsConfig {
        TlsConfig {
            certificate: self.write("server.pem", &signed.certificate),
            key: self.write("server.key", &signed.key),
            client_ca: None,
            http: false,
        }
    }
}

/// A client that trusts an authority, and may show a certificate.
pub fn endpoint(address: SocketAddr, authority: &Authority, own: Option<&Signed>) -> Endpoint {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority.pem()));
    if let Some(own) = own {
        tls = tls.identity(Identity::from_pem(&own.certificate, &own.key));
    }
    Channel::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap()
}

/// A client that trusts an authority, and may show a certificate.
pub fn tls_client(authority: &Authority, own: Option<&Signed>, protocol: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(Signed { certificate, key }) => {
            let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    Arc::new(config)
}

/// A TLS connection of a client that trusts an authority.
pub async fn tls_stream(
    address: SocketAddr,
    authority: &Authority,
    protocol: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    tls_stream_of(&tls_client(authority, None, protocol), address).await
}

pub async fn tls_stream_of(
    client: &Arc<ClientConfig>,
    address: SocketAddr,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(client.clone()).connect(name, stream).await
}
