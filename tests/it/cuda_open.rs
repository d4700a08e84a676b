//! Opening a CUDA device on machines with a stub driver (`stub_driver`): where its kernels come from, and
//! every error.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::program::flechette;
use crate::stub_driver::Machine;

#[test]
fn without_a_usable_gpu_serve_warns_with_auto_and_exits_with_cuda() {
    let cases = [
        (
            Machine::whole().with_setting("DRIVER", "12040"),
            "CUDA driver too old: expected at least 13.0, got 12.4",
        ),
        (
            Machine::whole().with_setting("COMPUTE", "61"),
            "compute 6.1, 1.0 GiB: expected compute 7.0 or newer",
        ),
        (Machine::whole().with_setting("DEVICES", "0"), "CUDA driver found, no device; check nvidia-smi"),
    ];
    for (machine, reason) in cases.into_iter().filter(|(machine, _)| machine.is_available()) {
        let warning = line_of_serve(&machine, "auto", reason);
        assert!(warning.contains(" WARN "), "{warning}");
        let none = tempfile::tempdir().unwrap();
        let ended = machine.equip(&mut serve("cuda", none.path())).output().unwrap();
        let text = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{text}");
        let line = text.lines().find(|line| line.contains(reason)).unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains("error: device.kind is cuda: expected "), "{line}");
    }
}

fn serve(device: &str, models: &Path) -> Command {
    let mut serve = flechette();
    serve.args(["serve", "--device", device, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--models"]);
    serve.arg(models).env("FLECHETTE_DEVICE_KERNEL_CACHE", "off");
    serve
}

/// The line of the log of `serve` with these words. Ends it then. Without models it waits for one.
fn line_of_serve(machine: &Machine, device: &str, words: &str) -> String {
    let none = tempfile::tempdir().unwrap();
    let mut serve = serve(device, none.path());
    let mut child = machine.equip(&mut serve).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let found = lines.into_iter().find(|line| line.contains(words));
    child.kill().unwrap();
    child.wait().unwrap();
    found.unwrap_or_else(|| panic!("serve has ended without saying {words:?}"))
}

#[test]
fn serve_uses_a_usable_gpu_and_logs_its_name() {
    let machine = Machine::whole();
    if !machine.is_available() {
        return;
    }
    for wanted in ["auto", "cuda"] {
        let line = line_of_serve(&machine, wanted, "Pretend GPU");
        assert!(line.contains(" INFO ") && line.contains("kernels by "), "{line}");
    }
}
