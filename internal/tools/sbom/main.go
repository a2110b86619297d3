// Command sbom writes what binaries and images consist of, as SPDX 2.3 documents in JSON:
//
//	sbom -out DIRECTORY -version VERSION -created TIME [-images DIRECTORY -digests FILE] BINARY...
//
// Each binary has a document with the modules that are linked into it, as its own build information names them, and each image of which
// the digest is given one with its files. Documents depend on their input alone: give the time of the commit, and the same binary has
// the same document.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom: "+err.Error())
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	out := flags.String("out", "", "`directory` of the documents")
	version := flags.String("version", "", "`version` of the binaries")
	created := flags.String("created", "", "`time` of the documents (RFC 3339)")
	images := flags.String("images", "", "`directory` of the descriptions of images")
	digests := flags.String("digests", "", "JSON `file` with the digests of images by their names, as fsb-local digests prints them")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || *version == "" || flags.NArg() == 0 {
		return errors.New("-out, -version and the binaries are required")
	}
	if _, err := time.Parse(time.RFC3339, *created); err != nil {
		return fmt.Errorf("reading -created: %w", err)
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	programs := map[string]program{}
	for _, path := range flags.Args() {
		p, err := readProgram(path, *version)
		if err != nil {
			return fmt.Errorf("reading %s: %w", path, err)
		}
		programs[p.name] = p
		d := newDocument(p.name, p.sum, *created)
		d.describe(d.program(p))
		if err := write(filepath.Join(*out, p.name+".spdx.json"), d.Document); err != nil {
			return err
		}
	}
	if *digests == "" {
		return nil
	}
	descriptions, err := readDescriptions(*images)
	if err != nil {
		return err
	}
	return writeImages(*out, *created, *digests, descriptions, programs)
}

// writeImages writes the documents of the images that have a digest.
func writeImages(out, created, digestFile string, descriptions []description, programs map[string]program) error {
	raw, err := os.ReadFile(digestFile)
	if err != nil {
		return err
	}
	var digests map[string]string
	if err := json.Unmarshal(raw, &digests); err != nil {
		return fmt.Errorf("reading %s: %w", digestFile, err)
	}
	for _, i := range descriptions {
		digest := digests[i.Name]
		if digest == "" {
			continue
		}
		d, err := imageDocument(i, digest, created, programs)
		if err != nil {
			return fmt.Errorf("describing the image %s: %w", i.Name, err)
		}
		if err := write(filepath.Join(out, "image-"+i.short()+".spdx.json"), d.Document); err != nil {
			return err
		}
	}
	return nil
}

func write(path string, d *spdx.Document) error {
	// Maps have been iterated over.
	slices.SortFunc(d.Packages, func(a, b *spdx.Package) int {
		return cmp.Compare(a.PackageSPDXIdentifier, b.PackageSPDXIdentifier)
	})
	slices.SortFunc(d.Relationships, func(a, b *spdx.Relationship) int {
		return cmp.Or(cmp.Compare(a.RefA.ElementRefID, b.RefA.ElementRefID), cmp.Compare(a.Relationship, b.Relationship),
			cmp.Compare(a.RefB.ElementRefID, b.RefB.ElementRefID))
	})
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := spdxjson.Write(d, f, spdxjson.Indent("  ")); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}
