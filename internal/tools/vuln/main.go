// Command vuln runs govulncheck over modules, and compares what it finds with the exceptions that a person has reviewed:
//
//	vuln -exceptions FILE [-db URL] DIRECTORY...
//
// It fails if the code calls a vulnerable function and no exception says why that is acceptable, if an exception has ended or is no
// longer needed, and if the database cannot be read: what was not checked never passes. Vulnerabilities in modules whose
// vulnerable functions are not called are printed only.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "vuln: "+err.Error())
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("vuln", flag.ContinueOnError)
	db := flags.String("db", "", "`URL` of the database: https or file; empty: that of the Go project")
	file := flags.String("exceptions", "", "YAML `file` of reviewed exceptions")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() == 0 {
		return errors.New("no directory of a module is named")
	}
	if *db == "" {
		*db = goDatabase
	}
	exceptions, err := readExceptions(*file)
	if err != nil {
		return err
	}
	if err := reachable(ctx, *db); err != nil {
		return fmt.Errorf("the database of vulnerabilities cannot be read, so nothing was checked; name a copy with VULNDB=https://... or VULNDB=file:///...: %w", err)
	}
	var found []vulnerability
	for _, dir := range flags.Args() {
		more, err := scanModule(ctx, *db, dir)
		if err != nil {
			return fmt.Errorf("checking %s: %w", dir, err)
		}
		found = append(found, more...)
	}
	return judge(os.Stdout, found, exceptions, time.Now())
}
