package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/vuln/scan"
)

// goDatabase is the database that govulncheck reads by default.
const goDatabase = "https://vuln.go.dev"

// reachTimeout bounds the attempt to reach the database.
const reachTimeout = 20 * time.Second

// reachable reports with an error why a database cannot be read.
func reachable(ctx context.Context, db string) error {
	u, err := url.Parse(db)
	if err != nil {
		return err
	}
	switch u.Scheme {
	case "file":
		_, err := os.Stat(filepath.Join(filepath.FromSlash(u.Path), "index", "modules.json"))
		return err
	case "https", "http":
	default:
		return fmt.Errorf("%q is no URL with https or file", db)
	}
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodHead, strings.TrimRight(db, "/")+"/index/modules.json.gz", nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", request.URL, answer.Status)
	}
	return nil
}

// vulnerability is one entry of the database that concerns a module.
type vulnerability struct {
	id, summary string
	// module is where it is, at a version; fixed is the version without it, empty if there is none.
	module, version, fixed string
	// called is a function of ours from which the vulnerable one is called; empty if none calls it.
	called string
}

// message is what this command reads of govulncheck's output, a stream of such objects.
type message struct {
	OSV *struct {
		ID      string `json:"id"`
		Summary string `json:"summary"`
	} `json:"osv"`
	Finding *struct {
		OSV   string  `json:"osv"`
		Fixed string  `json:"fixed_version"`
		Trace []frame `json:"trace"`
	} `json:"finding"`
}

// frame is a step from the vulnerable function, the first one, to a function of the module that is checked.
type frame struct {
	Module   string `json:"module"`
	Version  string `json:"version"`
	Package  string `json:"package"`
	Function string `json:"function"`
	Receiver string `json:"receiver"`
}

// scanModule runs govulncheck in a module.
func scanModule(ctx context.Context, db, dir string) ([]vulnerability, error) {
	var out, problems bytes.Buffer
	cmd := scan.Command(ctx, "-C", dir, "-db", db, "-format", "json", "./...")
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, problems.Bytes())
	}
	return parse(&out)
}

// parse reads the output of govulncheck. It reports a vulnerability several times: in a module, in a package that is imported, and for each
// function that is called.
func parse(r io.Reader) ([]vulnerability, error) {
	summaries, byID := map[string]string{}, map[string]*vulnerability{}
	stream := json.NewDecoder(r)
	for {
		var m message
		err := stream.Decode(&m)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading the output of govulncheck: %w", err)
		}
		if m.OSV != nil {
			summaries[m.OSV.ID] = m.OSV.Summary
		}
		if f := m.Finding; f != nil && len(f.Trace) > 0 {
			at, last := f.Trace[0], f.Trace[len(f.Trace)-1]
			v := byID[f.OSV]
			if v == nil {
				v = &vulnerability{id: f.OSV, module: at.Module, version: at.Version, fixed: f.Fixed}
				byID[f.OSV] = v
			}
			if at.Function != "" && v.called == "" {
				v.called = last.name()
			}
		}
	}
	var out []vulnerability
	for id, v := range byID {
		v.summary = summaries[id]
		out = append(out, *v)
	}
	slices.SortFunc(out, func(a, b vulnerability) int { return strings.Compare(a.id, b.id) })
	return out, nil
}

func (f frame) name() string {
	if f.Receiver != "" {
		return f.Package + "." + f.Receiver + "." + f.Function
	}
	return f.Package + "." + f.Function
}
