use super::*;

#[test]
fn the_exit_code_tells_whose_fault_it_was() {
    let schema = SchemaError::Form { line: 1, reason: "no".into() };
    assert_eq!(exit_code(&anyhow::Error::from(schema).context("model.toml")), 2);
    assert_eq!(exit_code(&InputError(anyhow::anyhow!("no")).into()), 2);
    assert_eq!(exit_code(&io::Error::from(io::ErrorKind::StorageFull).into()), 1);
    assert_eq!(exit_code(&io::Error::from(io::ErrorKind::BrokenPipe).into()), 0);
}

#[test]
fn the_flags_of_every_command_are_consistent() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}
