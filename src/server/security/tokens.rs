//! Tokens of clients. Only their digests are kept.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConstantTimeEq};
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::AUTHORIZATION;

use super::files::{Asker, Contents, FileError, SettingFile, Watched};
use crate::config::AuthConfig;

/// Bytes of a token. A short one could be guessed.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// Most tokens of a file. A call is compared with each of them.
const TOKENS: usize = 256;

/// What a client may do. A token has the roles of all files that contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Predict,
    Admin,
    Metrics,
}

impl Role {
    const ALL: [Self; 3] = [Self::Predict, Self::Admin, Self::Metrics];

    /// The setting that names its file.
    pub(crate) fn setting(self) -> &'static str {
        match self {
            Self::Predict => "auth.predict",
            Self::Admin => "auth.admin",
            Self::Metrics => "auth.metrics",
        }
    }
}

/// Why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("authorization: expected Bearer and a token of {}, got none", .0.setting())]
    Missing(Role),
    #[error("authorization: expected Bearer and a token of {}, got an unknown one", .0.setting())]
    Unknown(Role),
    #[error("authorization: expected a token of {}, got one of another role", .0.setting())]
    OtherRole(Role),
}

/// A SHA-256 digest. Words are compared in constant time much faster than bytes.
type Words = [u64; 4];

/// The tokens that calls of a role need.
pub(crate) struct TokenFile {
    role: Role,
    digests: Watched<Vec<Words>>,
}

impl TokenFile {
    /// Whether it contains a token. The time depends only on the number of tokens.
    fn has(&self, digest: &Words) -> bool {
        let equal = |known: &Words| {
            let words = known.iter().zip(digest);
            words.fold(Choice::from(1), |equal, (own, other)| equal & own.ct_eq(other))
        };
        self.digests.value().iter().fold(Choice::from(0), |found, known| found | equal(known)).into()
    }
}

/// The tokens of all roles that need one. Each file is read again by itself: one that cannot be used must not
/// keep a token valid that was removed from another one.
pub(crate) struct Tokens(Vec<TokenFile>);

/// Reads the file of each role that has one.
pub(crate) fn open(config: &AuthConfig) -> impl Iterator<Item = Result<TokenFile, FileError>> {
    let paths = [&config.predict, &config.admin, &config.metrics];
    let files = Role::ALL.into_iter().zip(paths).filter_map(|(role, path)| Some((role, path.clone()?)));
    files.map(|(role, path)| {
        let file = SettingFile { setting: role.setting(), path };
        Ok(TokenFile { role, digests: Watched::open(vec![file], read)? })
    })
}

/// # Errors
/// When the file has no tokens, too many, or a line that is no token.
fn read(files: &[Contents]) -> Result<Vec<Words>, FileError> {
    let mut digests = Vec::new();
    for file in files {
        digests.extend(lines(&file.bytes).map_err(|wrong| file.wrong(wrong))?.map(sha256));
        if digests.len() > TOKENS {
            return Err(file.wrong(format!("limit {TOKENS} tokens, got {}", digests.len())));
        }
    }
    Ok(digests)
}

/// The tokens of a file: one on each line. Empty lines and those that begin with # do not count.
///
/// # Errors
/// What is wrong, without any part of the file.
pub(crate) fn lines(file: &[u8]) -> Result<impl Iterator<Item = &[u8]>, String> {
    let lines = file.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).enumerate();
    let tokens = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(b"#"));
    for (at, token) in tokens.clone() {
        let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            let (line, got) = (at + 1, token.len());
            return Err(format!(
                "line {line}: expected {least} to {most} visible characters, got {got} bytes"
            ));
        }
    }
    if tokens.clone().next().is_none() {
        return Err("expected a token on each line, got none".to_owned());
    }
    Ok(tokens.map(|(_, token)| token))
}

impl Tokens {
    /// # Errors
    /// When a file cannot be used.
    pub(crate) fn open(config: &AuthConfig) -> Result<Self, FileError> {
        open(config).collect::<Result<_, _>>().map(Self)
    }

    /// Whether any role needs a token.
    pub(crate) fn are_needed(&self) -> bool {
        !self.0.is_empty()
    }

    /// Reads the files again, as [`Watched::check`].
    pub(crate) fn check(&self, asker: Asker) {
        self.0.iter().for_each(|file| drop(file.digests.check(asker)));
    }

    /// # Errors
    /// When the role needs a token, and the headers do not have one of it.
    pub(crate) fn allow(&self, role: Role, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(own) = self.0.iter().find(|file| file.role == role) else { return Ok(()) };
        let value = headers.get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
        let password = (role == Role::Metrics).then(|| password(value)).flatten();
        let token = password.as_deref().or_else(|| bearer(value));
        let digest = sha256(token.ok_or(Refusal::Missing(role))?);
        if own.has(&digest) {
            return Ok(());
        }
        let roles = self.0.iter().filter(|file| file.role != role && file.has(&digest)).count();
        Err(if roles > 0 { Refusal::OtherRole(role) } else { Refusal::Unknown(role) })
    }
}

/// The token of a header's value: `Bearer`, in any case, and the token.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// The password of a header's value: `Basic`, in any case, and a name and a password in Base64. Browsers send
/// pages' requests with it, and cannot send `Bearer`.
fn password(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, encoded) = value.split_at_checked(6)?;
    let decoded =
        STANDARD.decode(encoded.trim_ascii()).ok().filter(|_| scheme.eq_ignore_ascii_case(b"basic "))?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    Some(decoded[colon + 1..].to_vec())
}

fn sha256(token: &[u8]) -> Words {
    let digest = digest(&SHA256, token);
    let words = digest.as_ref().as_chunks().0;
    std::array::from_fn(|at| u64::from_le_bytes(words[at]))
}

#[cfg(test)]
mod tests;
