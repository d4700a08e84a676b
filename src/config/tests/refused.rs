//! Wrong values and unknown names are refused with their key, their source and the nearest name, all at once.

use super::*;

#[test]
fn a_bad_value_is_reported_with_its_key_and_source() {
    let text = refusal(&[("FLECHETTE_SERVER_MAX_SAMPLES", "many")], "");
    assert_eq!(
        text,
        "server.max_samples (environment FLECHETTE_SERVER_MAX_SAMPLES): \
         expected a whole number from 1 to 1048576, got \"many\""
    );
    assert!(refusal(&[], "[cache]\nmode = \"maybe\"").contains("cache.mode"));
    assert!(refusal(&[], "[cache]\nmode = true").contains("expected a string or a number"));
    assert!(refusal(&[("FLECHETTE_SERVER_GRPC", "nowhere")], "").contains("host:port"));
    assert!(refusal(&[("FLECHETTE_CACHE_FRACTION", "NaN")], "").contains("cache.fraction"));
    assert_eq!(refusal(&[], "x = 1\n[server\n"), "config file : line 2: unclosed table, expected `]`");
}

#[test]
fn unknown_names_are_refused_with_their_place_and_the_nearest_name() {
    for (file, error) in [
        (
            "[server]\ngrpc = \"127.0.0.1:0\"\nmax_sample = 1\n",
            "file :3: unknown key server.max_sample; did you mean server.max_samples?",
        ),
        ("[cahce]\nmode = \"off\"\n", "file :1: unknown section cahce; did you mean cache?"),
        ("\nloose = 1\n", "file :2: unknown key loose"),
        ("[entirely_other]\nx = 1\n", "file :1: unknown section entirely_other"),
    ] {
        assert_eq!(refusal(&[], file), error);
    }
    let error = refusal(&[("FLECHETTE_CACHE_BYTE", "1")], "");
    let expected = "environment: unknown variable FLECHETTE_CACHE_BYTE; did you mean FLECHETTE_CACHE_BYTES?";
    assert_eq!(error, expected);
}

#[test]
fn variables_of_tests_and_of_kubernetes_services_are_not_settings() {
    for name in [
        "FLECHETTE_DATA",
        "FLECHETTE_TEST_KILLS",
        "FLECHETTE_SERVICE_HOST",
        "FLECHETTE_SERVICE_PORT",
        "FLECHETTE_SERVICE_PORT_GRPC",
        "FLECHETTE_PORT",
        "FLECHETTE_PORT_8001_TCP_ADDR",
        "FLECHETTE_HTTP_SERVICE_HOST",
        "PATH",
    ] {
        assert!(resolve(&Flags::default(), &[(name, "tcp://10.0.0.1:8001")], "").is_ok(), "{name}");
    }
    for name in ["FLECHETTE_SERVER_PORTS", "FLECHETTE_HTTP_PORT", "FLECHETTE_PORT"] {
        assert!(refusal(&[(name, "9002")], "").contains("unknown variable"), "{name}");
    }
}

#[test]
fn everything_that_is_wrong_is_found_at_once() {
    let file = "[server]\nhtpp = 1\nmax_samples = 0\n[cache]\nmode = \"maybe\"\n[log]\nlevel = \"inof\"\n";
    let mut layers = Layers::default();
    layers.add_file(Path::new("f"), file);
    layers.add_environment([("FLECHETTE_THREADS_IO".into(), "many".into())]);
    let problems: Vec<String> = layers.problems().iter().map(ToString::to_string).collect();
    let begin = [
        "file f:2: unknown key server.htpp; did you mean server.http?",
        "server.max_samples (file f:3): ",
        "cache.mode (file f:5): ",
        "threads.io (environment FLECHETTE_THREADS_IO): ",
        "log.level (file f:7): expected error, warn",
    ];
    assert_eq!(problems.len(), begin.len(), "{problems:?}");
    assert!(problems.iter().zip(begin).all(|(problem, begin)| problem.starts_with(begin)), "{problems:?}");
}
