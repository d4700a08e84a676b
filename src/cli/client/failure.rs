//! What is said of a call that the server has not answered: the cause, which tonic hides behind "transport
//! error", and a hint. The first call of a client fails most often because of its flags.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError, Error as TlsError};
use tonic::transport::Error as TransportError;
use tonic::{Code, Status, TimeoutExpired};

use crate::cli::error_line;

/// The status of a call with its cause. A status that the server sent has no source, and stays as it is.
pub(crate) fn explained(status: Status, hint: Option<&'static str>) -> Status {
    let Some(source) = status.source() else { return status };
    let code = if status.code() == Code::Unknown { Code::Unavailable } else { status.code() };
    Status::new(code, format!("the connection failed: {}", cause(source, hint)))
}

/// The line of a failed connection without tonic's own words, and a hint: the one of a failed handshake, or
/// `otherwise`.
pub(super) fn cause(error: &(dyn Error + 'static), otherwise: Option<&'static str>) -> String {
    let below = if error.is::<TransportError>() { error.source() } else { None };
    let line = error_line(below.unwrap_or(error));
    // In hyper's words.
    let hangs = line.contains("keep-alive timed out").then_some("the server hangs, or the network is cut");
    match chain(error).find_map(tls_hint).or(hangs).or(otherwise) {
        Some(hint) => format!("{line}: {hint}"),
        None => line,
    }
}

/// Whether the time limit of a call was over before its answer began.
pub(super) fn is_late(status: &Status) -> bool {
    status.source().is_some_and(|source| chain(source).any(|cause| cause.is::<TimeoutExpired>()))
}

fn chain<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn tls_hint(error: &(dyn Error + 'static)) -> Option<&'static str> {
    // The source of an I/O error is that of the error in it.
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let tls = match inner {
        Some(inner) => inner.downcast_ref::<TlsError>(),
        None => error.downcast_ref::<TlsError>(),
    };
    match tls? {
        TlsError::InvalidMessage(_) => Some("is this port encrypted? Otherwise it needs http://"),
        // The latter for another authority of the same name.
        TlsError::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            Some("does --ca name the authority of the server's certificate?")
        }
        TlsError::AlertReceived(AlertDescription::NoApplicationProtocol) => Some(IS_GRPC),
        TlsError::AlertReceived(AlertDescription::CertificateRequired) => {
            Some("the server asks for a certificate: --certificate and --key")
        }
        _ => None,
    }
}

const IS_GRPC: &str = "is this the gRPC port (8001 by default)?";

/// The hint for a first call that fails.
pub(super) fn first_hint(encrypted: bool) -> &'static str {
    match encrypted {
        true => "is this the gRPC port (8001 by default), and does it need --certificate and --key?",
        false => "is this the gRPC port (8001 by default), and does it need https:// and --ca?",
    }
}
