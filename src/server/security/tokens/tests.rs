use std::fs;

use tempfile::TempDir;

use super::*;

const PREDICT: &str = "predict-0123456789abcdef";
const ADMIN: &str = "admin-0123456789abcdef";
const BOTH: &str = "both-0123456789abcdef";

fn headers(value: &str) -> HeaderMap {
    HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
}

/// Reads files of the roles predict and admin.
fn open(predict: &str, admin: &str) -> Result<Tokens, FileError> {
    open_in(&tempfile::tempdir().unwrap(), predict, admin)
}

fn open_in(folder: &TempDir, predict: &str, admin: &str) -> Result<Tokens, FileError> {
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        Some(folder.path().join(name))
    };
    Tokens::open(&AuthConfig { predict: file("p", predict), admin: file("a", admin), metrics: None })
}

#[test]
fn a_token_is_removed_while_the_file_of_another_role_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = open_in(&folder, &format!("{PREDICT}\n{BOTH}"), ADMIN).unwrap();
    let allowed = |token| tokens.allow(Role::Predict, &headers(&format!("Bearer {token}")));
    fs::remove_file(folder.path().join("a")).unwrap();
    tokens.check(Asker::Timer);
    assert_eq!(allowed(BOTH), Ok(()));
    fs::write(folder.path().join("p"), PREDICT).unwrap();
    tokens.check(Asker::Timer);
    assert_eq!([PREDICT, BOTH].map(allowed), [Ok(()), Err(Refusal::Unknown(Role::Predict))]);
    assert_eq!(tokens.allow(Role::Admin, &headers(&format!("Bearer {ADMIN}"))), Ok(()));
}

#[test]
fn a_token_has_the_roles_of_all_files_that_contain_it() {
    let tokens = open(&format!("# score\n{PREDICT}\n\n{BOTH}"), &format!("{BOTH}\r\n{ADMIN}\n")).unwrap();
    let bearer = |token| headers(&format!("Bearer {token}"));
    for (token, predict, admin) in [
        (PREDICT, Ok(()), Err(Refusal::OtherRole(Role::Admin))),
        (ADMIN, Err(Refusal::OtherRole(Role::Predict)), Ok(())),
        (BOTH, Ok(()), Ok(())),
        (
            "predict-0123456789abcdeg",
            Err(Refusal::Unknown(Role::Predict)),
            Err(Refusal::Unknown(Role::Admin)),
        ),
        ("# score", Err(Refusal::Unknown(Role::Predict)), Err(Refusal::Unknown(Role::Admin))),
        ("", Err(Refusal::Unknown(Role::Predict)), Err(Refusal::Unknown(Role::Admin))),
    ] {
        assert_eq!(tokens.allow(Role::Predict, &bearer(token)), predict, "{token}");
        assert_eq!(tokens.allow(Role::Admin, &bearer(token)), admin, "{token}");
        assert_eq!(tokens.allow(Role::Metrics, &bearer(token)), Ok(()), "a role without a file is open");
    }
}

#[test]
fn only_the_scheme_bearer_is_accepted_in_any_case() {
    let tokens = open(PREDICT, ADMIN).unwrap();
    for value in ["Bearer", "bearer", "BEARER"] {
        assert_eq!(tokens.allow(Role::Predict, &headers(&format!("{value} {PREDICT}"))), Ok(()), "{value}");
    }
    for value in ["", "Bearer", PREDICT, &format!("Basic {PREDICT}"), &format!("Bearer{PREDICT}")] {
        let refused = tokens.allow(Role::Predict, &headers(value));
        assert_eq!(refused, Err(Refusal::Missing(Role::Predict)), "{value}");
    }
    assert_eq!(tokens.allow(Role::Predict, &HeaderMap::new()), Err(Refusal::Missing(Role::Predict)));
}

#[test]
fn a_file_that_is_not_one_of_tokens_is_refused_by_line_without_its_contents() {
    let reason = |predict: &str| open(predict, ADMIN).err().unwrap().to_string();
    for (file, expected) in [
        ("", "expected a token on each line, got none"),
        ("# a\n\n", "expected a token on each line, got none"),
        ("\nsecret\n", "line 2: expected 16 to 512 visible characters, got 6 bytes"),
        (&format!("{PREDICT}\nsecret secret secret\n"), "line 2: expected 16 to 512 visible"),
        (&"s".repeat(513), "line 1: expected 16 to 512 visible characters, got 513 bytes"),
    ] {
        let reason = reason(file);
        assert!(reason.starts_with("auth.predict: /") && reason.contains(expected), "{reason}");
        assert!(!reason.contains("secret"), "{reason}");
    }
    let many: String = (0..300).map(|n| format!("0123456789abcdef{n}\n")).collect();
    assert!(reason(&many).contains("limit 256 tokens"));
}
