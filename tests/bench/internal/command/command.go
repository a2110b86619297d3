// Package command is the command line of the benchmarks: one subcommand for each suite, one for all of them, and one that
// puts saved results into a document.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/draw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

// output is what every suite does with its report.
type output struct {
	format, samples, plot, save string
	check, quiet                bool
}

func (o *output) flags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.format, "output", "o", report.FormatTable, "`format` on stdout: table, json or markdown")
	fs.StringVar(&o.samples, "samples", "", "`file` for all samples, as JSON, one a line")
	fs.StringVar(&o.plot, "plot", "", "`directory` for a plot of the suite, SUITE.svg")
	fs.StringVar(&o.save, "save", "", "`directory` for the results as SUITE.json and SUITE.md, which `bench report` reads")
	fs.BoolVar(&o.check, "check", false, "fail if a budget is missed or was not measured")
	fs.BoolVarP(&o.quiet, "quiet", "q", false, "no progress on stderr")
}

// suite measures and fills a report that has the description of the machine already.
type suite struct {
	name, title string
	run         func(ctx context.Context, say func(string, ...any), r *report.Report) error
}

// New returns the command.
func New() *cobra.Command {
	root := &cobra.Command{Use: "bench", Short: "Measure Fast Sandbox beside its alternatives", SilenceUsage: true}
	makers := []func(*pflag.FlagSet) suite{createSuite, burstSuite, insideSuite, rateSuite, registrySuite, scaleSuite, janitorSuite, gcSuite, densitySuite}
	for _, maker := range makers {
		o := &output{}
		cmd := &cobra.Command{Args: cobra.NoArgs}
		s := maker(cmd.Flags())
		o.flags(cmd.Flags())
		cmd.Use, cmd.Short = s.name, s.title
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return measure(cmd, s, o) }
		root.AddCommand(cmd)
	}
	o := &output{}
	all := &cobra.Command{Use: "all", Short: "Run every suite, one after the other, by their defaults", Args: cobra.NoArgs}
	o.flags(all.Flags())
	all.RunE = func(cmd *cobra.Command, _ []string) error {
		var errs []error
		for _, maker := range makers {
			if cmd.Context().Err() != nil {
				break
			}
			errs = append(errs, measure(cmd, maker(pflag.NewFlagSet("", pflag.ContinueOnError)), o))
		}
		return errors.Join(errs...)
	}
	root.AddCommand(all, reportCommand())
	return root
}

// measure runs a suite and writes its report.
func measure(cmd *cobra.Command, s suite, o *output) error {
	ctx := cmd.Context()
	if err := report.CheckFormat(o.format); err != nil { // before minutes of measuring
		return err
	}
	began := time.Now()
	say := func(format string, args ...any) {
		if !o.quiet {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s %7.1fs "+format+"\n", append([]any{s.name, time.Since(began).Seconds()}, args...)...)
		}
	}
	r := &report.Report{Suite: s.name, Title: s.title, Began: began}
	var err error
	if r.Environment, err = host.Describe(ctx); err != nil {
		return err
	}
	if r.Commit, err = host.Commit(ctx, "."); err != nil {
		return err
	}
	if err := s.run(ctx, say, r); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	r.Took = time.Since(began)
	if err := r.Write(cmd.OutOrStdout(), o.format); err != nil {
		return err
	}
	if err := o.files(r); err != nil {
		return err
	}
	if o.check {
		return budget.Check(r.Budgets)
	}
	return nil
}

// files writes the files that the flags name.
func (o *output) files(r *report.Report) error {
	write := func(path string, render func(*bytes.Buffer) error) error {
		var b bytes.Buffer
		if err := render(&b); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("making a directory: %w", err)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			return fmt.Errorf("writing a result: %w", err)
		}
		return nil
	}
	var errs []error
	if o.samples != "" {
		errs = append(errs, write(o.samples, func(b *bytes.Buffer) error { return r.WriteSamples(b) }))
	}
	if o.plot != "" {
		errs = append(errs, write(filepath.Join(o.plot, r.Suite+".svg"), func(b *bytes.Buffer) error { return draw.SVG(b, r.Figure) }))
	}
	if o.save != "" {
		errs = append(errs,
			write(filepath.Join(o.save, r.Suite+".json"), func(b *bytes.Buffer) error { return r.Write(b, report.FormatJSON) }),
			write(filepath.Join(o.save, r.Suite+".md"), func(b *bytes.Buffer) error { return r.Write(b, report.FormatMarkdown) }))
	}
	return errors.Join(errs...)
}
