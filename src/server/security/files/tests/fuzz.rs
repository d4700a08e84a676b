//! Files of tokens and certificates, and the header with a token.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, KeyPair};
use tonic::codegen::http::HeaderValue;
use tonic::codegen::http::header::{AUTHORIZATION, HeaderMap};

use super::super::super::{tls, tokens};
use super::*;
use crate::config::AuthConfig;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;
use proptest::prelude::*;
use proptest::sample::Index;

fn file(setting: &'static str, bytes: Vec<u8>) -> Contents {
    Contents { setting, path: PathBuf::from("f"), bytes }
}

#[test]
fn tokens_and_the_header_of_a_call() {
    const TOKEN: &str = "predict-0123456789abcdef";
    let seed = format!("# two\n{TOKEN}\r\n\nadmin-0123456789abcdef\n");
    let basic = STANDARD.encode(format!("scraper:{TOKEN}"));
    let headers = [format!("Bearer {TOKEN}"), format!("Basic {basic}")];
    let words = &["Bearer ", "basic ", " ", "=", TOKEN];
    let role = prop::sample::select(vec![tokens::Role::Predict, tokens::Role::Metrics]);
    let inputs = (mutated([seed], &["\n", "# ", TOKEN, "\u{e9}"]), mutated(headers, words), role);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens");
    run(inputs, |(Input(text), Input(header), role)| {
        fs::write(&path, &text).unwrap();
        let of = |named| (named == role).then(|| path.clone());
        let auth = AuthConfig {
            predict: of(tokens::Role::Predict),
            metrics: of(tokens::Role::Metrics),
            ..AuthConfig::default()
        };
        let tokens = match tokens::Tokens::open(&auth) {
            Ok(tokens) => tokens,
            Err(error) => {
                let lines = text.split(|byte| *byte == b'\n').filter(|line| line.len() > 10);
                let lines: Vec<_> = lines.filter_map(|line| std::str::from_utf8(line).ok()).collect();
                assert!(!lines.iter().any(|line| error.to_string().contains(line)), "{error}");
                return false;
            }
        };
        let Ok(value) = HeaderValue::from_bytes(&header) else { return false };
        let allowed = tokens.allow(role, &HeaderMap::from_iter([(AUTHORIZATION, value)])).is_ok();
        // What is allowed ends with a token of the file; with `Basic`, in Base64 and after a colon.
        let given = header.get(7..).unwrap_or_default().trim_ascii();
        let decoded = STANDARD.decode(header.get(6..).unwrap_or_default().trim_ascii()).unwrap_or_default();
        let known = |token: &[u8]| {
            token == given || decoded.strip_suffix(token).is_some_and(|name| name.ends_with(b":"))
        };
        assert!(!allowed || tokens::lines(&text).unwrap().any(known));
        allowed
    });
}

/// A PEM file with these bytes.
fn pem(label: &str, der: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----\n").into_bytes();
    for (at, bytes) in der.chunks(3).enumerate() {
        let bits = bytes.iter().chain(&[0; 2]).take(3).fold(0, |bits, byte| bits << 8 | usize::from(*byte));
        let digits = [18, 12, 6, 0].map(|shift| DIGITS[bits >> shift & 63]);
        text.extend(&digits[..=bytes.len()]);
        text.extend(&b"=="[..3 - bytes.len()]);
        if at % 16 == 15 {
            text.push(b'\n');
        }
    }
    text.extend(format!("\n-----END {label}-----\n").bytes());
    text
}

#[test]
fn certificates_and_keys() {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let good = [pem("CERTIFICATE", certificate.der()), pem("PRIVATE KEY", &key.serialize_der())];
    let labels = ["CERTIFICATE", "PRIVATE KEY"];
    let words = &["-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n", "\n", "=", "EC ", "RSA "];
    let der = mutated([certificate.der().to_vec(), key.serialize_der()], &[]);
    let text = mutated([good.concat(), good[1].clone(), good[0].repeat(2)], words);
    // The bytes in the base64, or the text, of one of the three files.
    run((any::<Index>(), any::<bool>(), der, text), |(at, inside, Input(der), Input(text))| {
        let mut files = [good[0].clone(), good[1].clone(), good[0].clone()];
        let at = at.index(3);
        files[at] = if inside { pem(labels[at % 2], &der) } else { text };
        let settings = ["tls.certificate", "tls.key", "tls.client_ca"];
        let files: Vec<_> =
            settings.into_iter().zip(files).map(|(setting, bytes)| file(setting, bytes)).collect();
        match tls::read(&files) {
            Ok(tls) => !tls.expires.is_zero(),
            Err(error) => {
                assert!(settings.contains(&error.setting) && !error.reason.is_empty(), "{error}");
                false
            }
        }
    });
}
