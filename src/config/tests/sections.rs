//! The values of the sections, and limits that depend on each other: of the server, its batchers, the log of
//! learned samples, traces and devices.

use super::*;

#[test]
fn administration_and_reflection_are_on_but_with_tokens_only_if_they_are_asked_for() {
    let switches = |file: &str| {
        let server = resolve(&Flags::default(), &[], file).unwrap().server;
        (server.admin, server.reflection)
    };
    assert_eq!(switches(""), (true, true));
    assert_eq!(switches("[server]\nadmin = \"off\""), (false, true));
    for role in ["predict", "admin", "metrics"] {
        assert_eq!(switches(&format!("[auth]\n{role} = \"f\"")), (false, false), "{role}");
    }
    assert_eq!(switches("[auth]\nadmin = \"f\"\n[server]\nadmin = \"on\""), (true, false));
}

#[test]
fn bytes_take_suffixes() {
    let cases = [("512", 512), ("64K", 64_000), ("1.5Ki", 1536), ("2 GB", 2_000_000_000), ("1GiB", 1 << 30)];
    for (text, bytes) in cases {
        assert_eq!(parse_bytes(text), Some(bytes), "{text}");
    }
    for text in ["", "K", "-1", "-1K", "1X", "inf K", "1e30G"] {
        assert_eq!(parse_bytes(text), None, "{text}");
    }
}

#[test]
fn a_queue_smaller_than_one_request_is_refused() {
    let text = refusal(&[("FLECHETTE_BATCHER_QUEUE_SAMPLES", "100")], "");
    assert!(text.contains("batcher.queue_samples") && text.contains("4096"), "{text}");
}

#[test]
fn limits_that_cannot_hold_the_largest_message_are_refused() {
    let config =
        |keys: &str| resolve(&Flags::default(), &[], &format!("[server]\nmax_bytes = \"64MiB\"\n{keys}"));
    let chosen = config("").unwrap();
    assert_eq!(chosen.batchers.common.queue_bytes, 768 << 20);
    assert_eq!(chosen.server.max_inflight_bytes, 33 * (64 << 20) + 25_311_088);
    for (keys, key, least) in [
        ("[batcher]\nqueue_bytes = \"767MiB\"", "batcher.queue_bytes", chosen.batchers.common.queue_bytes),
        ("max_inflight_bytes = \"2GiB\"", "server.max_inflight_bytes", chosen.server.max_inflight_bytes),
    ] {
        let text = config(keys).unwrap_err().to_string();
        let needed = format!("at least {least}, which a message of server.max_bytes = 67108864 may take");
        assert!(text.starts_with(key) && text.contains(&needed), "{text}");
    }
}

#[test]
fn a_log_of_learned_samples_has_room_for_several_files() {
    let config = |keys: &str| resolve(&Flags::default(), &[], &format!("[learn]\n{keys}"));
    assert_eq!(config("").unwrap().learn.segment_bytes, 64 << 20);
    assert_eq!(config("max_bytes = \"1MiB\"").unwrap().learn.segment_bytes, 256 << 10);
    let text = config("max_bytes = \"1MiB\"\nsegment_bytes = \"257KiB\"").unwrap_err().to_string();
    let needed = "from 65536 to 262144, a fourth of learn.max_bytes = 1048576";
    assert!(text.starts_with("learn.segment_bytes") && text.contains(needed), "{text}");
}

#[test]
fn seconds_reach_their_fields() {
    let file = "[server]\nhandshake_seconds = 1\nbody_seconds = 2\nwrite_seconds = 3\ngrpc_idle_seconds = 0\n\
                stream_idle_seconds = 4\n";
    let server = resolve(&Flags::default(), &[], file).unwrap().server;
    let times = [server.handshake, server.body, server.write, server.stream_idle];
    assert_eq!(times, [1, 2, 3, 4].map(Duration::from_secs));
    assert_eq!(server.grpc_idle, None);
    assert!(refusal(&[], "[server]\nbody_seconds = 0").contains("server.body_seconds"));
}

#[test]
fn accesses_are_recorded_only_with_a_rate() {
    let config = resolve(&Flags::default(), &[], "").unwrap();
    assert_eq!(config.trace, TraceConfig { rate: 0.0, max_bytes: 64 << 20 });
    let config =
        resolve(&Flags::default(), &[("FLECHETTE_TRACE_RATE", "0.01")], "[trace]\nmax_bytes = \"2Mi\"");
    assert_eq!(config.unwrap().trace, TraceConfig { rate: 0.01, max_bytes: 2 << 20 });
    for rate in ["-0.1", "1.5", "NaN", "some"] {
        let text = refusal(&[("FLECHETTE_TRACE_RATE", rate)], "");
        assert!(text.contains("trace.rate") && text.contains("a number from 0 to 1"), "{text}");
    }
    assert!(refusal(&[], "[trace]\nmax_bytes = 1000").contains("trace.max_bytes"));
}

#[test]
fn the_default_kernel_cache_is_in_the_users_cache_directory() {
    let kept = |env: &[_], file| resolve(&Flags::default(), env, file).unwrap().device.kernel_cache;
    let (home, caches) = (("HOME", "/home/user"), ("XDG_CACHE_HOME", "/caches"));
    assert_eq!(kept(&[home], ""), Some("/home/user/.cache/flechette/kernels".into()));
    assert_eq!(kept(&[home, caches], ""), Some("/caches/flechette/kernels".into()));
    assert_eq!(kept(&[home, ("XDG_CACHE_HOME", "caches")], ""), kept(&[home], ""));
    assert_eq!(kept(&[], ""), None);
    let file = "[device]\nkernel_cache = \"/kernels\"";
    assert_eq!(kept(&[home, caches], file), Some("/kernels".into()));
    assert_eq!(kept(&[home, ("FLECHETTE_DEVICE_KERNEL_CACHE", "off")], file), None);
}

#[test]
fn a_server_whose_models_everyone_can_change_has_a_warning() {
    let warning = |text: &str| resolve(&Flags::default(), &[], text).unwrap().open_administration();
    let open = "[server]\ngrpc = \"0.0.0.0:8001\"\n";
    let text = warning(open).unwrap();
    assert!(text.starts_with("server.admin: everyone who reaches 0.0.0.0:8001 (server.grpc) can"), "{text}");
    for closed in [
        "",
        "[server]\ngrpc = \"127.0.0.1:8001\"\n",
        &format!("{open}admin = \"off\"\n"),
        &format!("{open}[auth]\nadmin = \"tokens\"\n"),
        &format!("{open}[auth]\npredict = \"tokens\"\n"),
        &format!("{open}[tls]\ncertificate = \"c\"\nkey = \"k\"\nclient_ca = \"a\"\n"),
    ] {
        assert_eq!(warning(closed), None, "{closed}");
    }
}

#[test]
fn both_ports_cannot_have_one_address() {
    let refused = |grpc: &str, http: &str| {
        let file = format!("[server]\ngrpc = \"{grpc}\"\nhttp = \"{http}\"\n");
        resolve(&Flags::default(), &[], &file).err().map(|error| error.to_string())
    };
    for (grpc, http) in
        [("127.0.0.1:7", "127.0.0.1:7"), ("0.0.0.0:7", "127.0.0.1:7"), ("127.0.0.1:7", "0.0.0.0:7")]
    {
        let error = refused(grpc, http).unwrap();
        let expected =
            format!("server.http (file :3): expected another address than server.grpc, got \"{http}\"");
        assert_eq!(error, expected);
    }
    for (grpc, http) in
        [("127.0.0.1:0", "127.0.0.1:0"), ("127.0.0.1:7", "127.0.0.2:7"), ("127.0.0.1:7", "127.0.0.1:8")]
    {
        assert_eq!(refused(grpc, http), None);
    }
}
