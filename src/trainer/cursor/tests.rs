use super::*;
use crate::trainer::schedule::{Curve, Decay};

fn cursor() -> Cursor {
    let decay = Decay { curve: Curve::Poly2, start: 5, steps: 9, end: 1e-300 };
    let run = RunIdentity {
        format: "criteo-tsv".to_owned(),
        fields: FieldOptions::default(),
        files: vec!["a.tsv".to_owned(), "b.tsv".to_owned()],
        begins: vec!["1".to_owned(), "2".to_owned()],
        follow: None,
        learned: false,
        batch: 128,
        seed: u64::MAX,
        shuffle: Some(Shuffle { samples: 1000, seed: 3 }),
        held_out: Some(HeldOut { ratio: 0.1 + 0.2, seed: 4 }),
        lr: 0.1,
        schedule: Schedule { warmup: 3, decay: Some(decay) },
        replicas: Some(2),
        lambda: Some(4),
        validating: Some(Validating {
            valid: Some(ValidFile { name: "v.tsv".to_owned(), begin: "3".to_owned() }),
            early_stop: Some(2),
            save_best: true,
        }),
    };
    let best = Best { epoch: 2, log_loss: 0.123_456_789_012_345_67, version: Some(Version(7)) };
    let file = Some(FileAt { name: "b".to_owned(), samples: 17, complete: true });
    let validation = Validation { best: Some(best), bad_epochs: 1 };
    let log = Some("5d".to_owned());
    Cursor { run, epoch: 4, samples: 1 << 40, file, log, steps: 99, validation }
}

#[test]
fn a_cursor_is_the_same_after_it_was_written_and_read() {
    let text = serde_json::to_string(&cursor()).unwrap();
    assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), cursor());
    let earlier = text.replace("\"log\":\"5d\",", "");
    assert_ne!(earlier, text);
    let without = Cursor { log: None, ..cursor() };
    assert_eq!(serde_json::from_str::<Cursor>(&earlier).unwrap(), without);
    assert_eq!(serde_json::to_string(&without).unwrap(), earlier);
    let unknown = text.replacen("\"epoch\"", "\"other\":1,\"epoch\"", 1);
    assert!(serde_json::from_str::<Cursor>(&unknown).unwrap_err().to_string().contains("unknown field"));
}

#[test]
fn a_cursor_with_numbers_to_which_training_cannot_add_is_refused() {
    let refused = |change: &dyn Fn(&mut Cursor)| {
        let mut cursor = cursor();
        change(&mut cursor);
        Cursor::parse(&serde_json::to_string(&cursor).unwrap()).unwrap_err().to_string()
    };
    assert_eq!(refused(&|cursor| cursor.epoch = 0), "epoch: expected 1 to 1000000001, got 0");
    assert!(
        refused(&|cursor| cursor.samples = u64::MAX).starts_with("samples: expected 0 to 9007199254740991")
    );
    assert!(refused(&|cursor| cursor.validation.bad_epochs = u32::MAX).starts_with("bad_epochs: "));
}

#[test]
fn a_file_that_is_not_known_to_be_complete_is_written_as_by_earlier_programs() {
    let file = FileAt { name: "b".to_owned(), samples: 17, complete: false };
    let text = serde_json::to_string(&file).unwrap();
    assert_eq!(text, r#"{"name":"b","samples":17}"#);
    assert_eq!(serde_json::from_str::<FileAt>(&text).unwrap(), file);
}

#[test]
fn another_run_is_refused_by_the_flag_that_differs() {
    let run = cursor().run;
    assert_eq!(run.check(&run.clone()), Ok(()));
    let refused = |change: &dyn Fn(&mut RunIdentity)| {
        let mut other = run.clone();
        change(&mut other);
        run.check(&other).unwrap_err().to_string()
    };
    let other = refused(&|run| run.files[1] = "c.tsv".to_owned());
    assert_eq!(other, "--data: expected \"b.tsv\", as before, got \"c.tsv\"");
    assert!(refused(&|run| run.files.truncate(1)).starts_with("--data: expected [\"a.tsv\", \"b.tsv\"]"));
    // A pipe may have the same data.
    let mut piped = cursor().run;
    piped.begins[1].clear();
    assert_eq!((piped.check(&cursor().run), cursor().run.check(&piped)), (Ok(()), Ok(())));
    let other = refused(&|run| run.begins[1] = "3".to_owned());
    assert_eq!(
        other,
        "--data: expected \"b.tsv\" with the same beginning, as before, got another file of this name"
    );
    assert!(refused(&|run| run.follow = Some("in".to_owned())).starts_with("--follow: expected none"));
    let other = refused(&|run| run.fields.label = Some("click".to_owned()));
    assert_eq!(other, "--label: expected none, as before, got \"click\"");
    assert!(refused(&|run| run.fields.separator = Some('|')).starts_with("--separator: "));
    let columns = refused(&|run| run.fields.columns = Some(vec!["a".to_owned()]));
    assert!(columns.starts_with("--columns: expected none, as before, got [\"a\"]"), "{columns}");
    assert!(refused(&|run| run.batch = 64).starts_with("--batch: expected 128"));
    assert!(refused(&|run| run.shuffle = None).starts_with("--shuffle: "));
    assert!(refused(&|run| run.lr = 0.2).starts_with("--lr: expected 0.1"));
    let other = refused(&|run| run.format = "csv".to_owned());
    assert_eq!(other, "--format: expected \"criteo-tsv\", as before, got \"csv\"");
    // Learned samples have no lines.
    let learned = |format: &str| RunIdentity { learned: true, format: format.to_owned(), ..cursor().run };
    assert_eq!(learned("").check(&learned("csv")), Ok(()));
    assert!(refused(&|run| run.seed = 1).starts_with("--seed: "));
    assert!(refused(&|run| run.held_out = None).starts_with("--valid-ratio: "));
    assert!(refused(&|run| run.schedule.warmup = 4).starts_with("--lr-warmup: expected 3"));
    let other = refused(&|run| run.schedule.decay = None);
    assert_eq!(other, "--lr-decay: expected \"poly2\", as before, got none");
    let decay = |change: &dyn Fn(&mut Decay)| refused(&|run| run.schedule.decay.iter_mut().for_each(change));
    assert_eq!(decay(&|decay| decay.end = 0.5), "--lr-end: expected 1e-300, as before, got 0.5");
    assert_eq!(decay(&|decay| decay.steps = 8), "--lr-decay-steps: expected 9, as before, got 8");
    let other = refused(&|run| run.shuffle = Some(Shuffle { samples: 1000, seed: 5 }));
    assert_eq!(other, "--data-seed: expected 3, as before, got 5");
    let other = refused(&|run| run.held_out = Some(HeldOut { ratio: 0.1 + 0.2, seed: 5 }));
    assert_eq!(other, "--data-seed: expected 4, as before, got 5");
}

#[test]
fn a_run_that_is_validated_otherwise_is_refused_unless_that_is_not_known() {
    let run = cursor().run;
    let with = |change: &dyn Fn(&mut Validating)| {
        let mut validating = run.validating.clone().unwrap();
        change(&mut validating);
        RunIdentity { validating: Some(validating), ..run.clone() }
    };
    let file = |name: &str, begin: &str| {
        let (name, begin) = (name.to_owned(), begin.to_owned());
        Some(ValidFile { name, begin })
    };
    let (name, begin) =
        (with(&|now| now.valid = file("w.tsv", "3")), with(&|now| now.valid = file("v.tsv", "4")));
    for (other, expected) in [
        (&name, "--valid: expected \"v.tsv\", as before, got \"w.tsv\""),
        (&with(&|now| now.valid = None), "--valid: expected \"v.tsv\", as before, got none"),
        (
            &begin,
            "--valid: expected \"v.tsv\" with the same beginning, as before, got another file of this name",
        ),
        (&with(&|now| now.early_stop = None), "--early-stop: expected 2, as before, got none"),
        (&with(&|now| now.save_best = false), "--save-best: expected true, as before, got false"),
    ] {
        assert_eq!(run.check(other).unwrap_err().to_string(), expected);
    }
    let unknown = RunIdentity { validating: None, ..run.clone() };
    assert_eq!((unknown.check(&run), run.check(&unknown)), (Ok(()), Ok(())));
    // As earlier programs have written it.
    let text = serde_json::to_string(&unknown).unwrap();
    assert!(!text.contains("validating"), "{text}");
    assert_eq!(serde_json::from_str::<RunIdentity>(&text).unwrap(), unknown);
}

#[test]
fn a_followed_directory_is_not_another_one_nor_a_log() {
    let of = |follow: Option<&str>, learned| RunIdentity {
        files: Vec::new(),
        begins: Vec::new(),
        follow: follow.map(str::to_owned),
        learned,
        ..cursor().run
    };
    let (one, other, log) = (of(Some("in"), false), of(Some("late"), false), of(None, true));
    for (run, next, flag) in [(&one, &other, "--follow"), (&one, &log, "--follow"), (&log, &one, "--follow")]
    {
        assert_eq!(run.check(next).unwrap_err().flag, flag);
    }
    // What earlier programs wrote for all of them.
    let unknown = of(None, false);
    assert!([&one, &other, &log].iter().all(|run| unknown.check(run).is_ok()));
}

#[test]
fn the_best_version_of_its_own_cursor_is_the_version_that_has_it() {
    let mut cursor = cursor();
    let best = |cursor: &Cursor| cursor.validation_of(Version(5)).best.unwrap().version;
    assert_eq!(best(&cursor), Some(Version(7)));
    cursor.validation.best.as_mut().unwrap().version = Some(Best::THIS);
    assert_eq!(best(&cursor), Some(Version(5)));
}

#[test]
fn the_best_epoch_has_the_least_finite_log_loss() {
    let mut validation = Validation::default();
    let better: Vec<bool> = [f64::INFINITY, 0.5, 0.5, 0.4, 0.45]
        .into_iter()
        .zip(1..)
        .map(|(loss, n)| validation.add(n, loss))
        .collect();
    assert_eq!(better, [false, true, false, true, false]);
    assert_eq!((validation.best.unwrap().epoch, validation.bad_epochs), (4, 1));
}

#[test]
fn a_run_with_another_number_of_replicas_is_refused_unless_that_is_not_known() {
    let run = cursor().run;
    let replicas = RunIdentity { replicas: Some(3), ..run.clone() };
    let lambda = RunIdentity { lambda: Some(1), ..run.clone() };
    assert_eq!(run.check(&replicas).unwrap_err().to_string(), "--replicas: expected 2, as before, got 3");
    assert_eq!(run.check(&lambda).unwrap_err().to_string(), "--lambda: expected 4, as before, got 1");
    let unknown = RunIdentity { replicas: None, lambda: None, ..run.clone() };
    let one_unknown = RunIdentity { lambda: None, ..run.clone() };
    for unknown in [&unknown, &one_unknown] {
        assert_eq!((unknown.check(&run), run.check(unknown)), (Ok(()), Ok(())));
    }
    // As earlier programs have written it.
    let text = serde_json::to_string(&unknown).unwrap();
    assert!(!text.contains("replicas") && !text.contains("lambda"), "{text}");
    assert_eq!(serde_json::from_str::<RunIdentity>(&text).unwrap(), unknown);
}

#[test]
fn a_cursor_of_another_format_is_refused_by_its_number_whatever_its_fields_are() {
    assert_eq!(Cursor::parse(&serde_json::to_string(&cursor()).unwrap()).unwrap(), cursor());
    let error = Cursor::parse(r#"{"format": 2, "place": {"epoch": 1}}"#).unwrap_err();
    assert_eq!(error.to_string(), "format: expected 1, got 2");
    assert!(Cursor::parse(r#"{"place": 1}"#).unwrap_err().to_string().contains("unknown field `place`"));
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated};
    use crate::fuzz::run;

    #[test]
    fn cursors() {
        let words = &["run", "epoch", "samples", "file", "null", "schedule", "poly2", "held_out", "[]", "{}"];
        run(mutated([serde_json::to_string_pretty(&cursor()).unwrap()], words), |Input(text)| {
            let Ok(read) = serde_json::from_slice::<Cursor>(&text) else { return false };
            let written = serde_json::to_string(&read).unwrap();
            assert_eq!(serde_json::from_str::<Cursor>(&written).unwrap(), read);
            let run = cursor().run;
            let same = run.check(&read.run).is_ok();
            // What the cursors of earlier programs do not say is taken as the same, and how a pipe begins.
            let mut begins = read.run.begins.clone();
            begins
                .iter_mut()
                .zip(&run.begins)
                .filter(|(begin, _)| begin.is_empty())
                .for_each(|(begin, own)| begin.clone_from(own));
            let known = RunIdentity {
                begins,
                validating: read.run.validating.clone().or(run.validating.clone()),
                replicas: read.run.replicas.or(run.replicas),
                lambda: read.run.lambda.or(run.lambda),
                ..read.run
            };
            assert_eq!(same, known == run);
            true
        });
    }
}
