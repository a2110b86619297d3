package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
)

const (
	noAssertion = "NOASSERTION"
	license     = "Apache-2.0"
	namespace   = "https://fast-sandbox.io/spdx/"
)

// program is a binary and its build information.
type program struct {
	name, version string
	sum           string // SHA-256 of the file
	info          *debug.BuildInfo
}

func readProgram(path, version string) (program, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return program{}, err
	}
	sum, err := fileSum(path)
	return program{name: filepath.Base(path), version: version, sum: sum, info: info}, err
}

func fileSum(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// document is an SPDX document that is being made.
type document struct {
	*spdx.Document
	known map[common.ElementID]bool
}

func newDocument(name, sum, created string) document {
	return document{known: map[common.ElementID]bool{}, Document: &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName: name, DocumentNamespace: namespace + name + "-" + sum,
		CreationInfo: &spdx.CreationInfo{Created: created, Creators: []common.Creator{{CreatorType: "Tool", Creator: "fast-sandbox-sbom"}}},
	}}
}

// add adds a package once and returns its identifier.
func (d document) add(p *spdx.Package) common.ElementID {
	if !d.known[p.PackageSPDXIdentifier] {
		d.known[p.PackageSPDXIdentifier] = true
		p.PackageCopyrightText, p.PackageLicenseConcluded = noAssertion, noAssertion
		if p.PackageLicenseDeclared == "" {
			p.PackageLicenseDeclared = noAssertion
		}
		if p.PackageDownloadLocation == "" {
			p.PackageDownloadLocation = noAssertion
		}
		p.IsFilesAnalyzedTagPresent = true
		d.Packages = append(d.Packages, p)
	}
	return p.PackageSPDXIdentifier
}

func (d document) relate(a common.ElementID, kind string, b common.ElementID) {
	d.Relationships = append(d.Relationships, &spdx.Relationship{RefA: common.DocElementID{ElementRefID: a}, Relationship: kind, RefB: common.DocElementID{ElementRefID: b}})
}

// describe says what the document is about.
func (d document) describe(id common.ElementID) {
	d.relate("DOCUMENT", common.TypeRelationshipDescribe, id)
}

// program adds a binary with its modules, and the standard library with the version of Go.
func (d document) program(p program) common.ElementID {
	id := d.add(&spdx.Package{
		PackageName: p.name, PackageSPDXIdentifier: elementID("program", p.name, p.sum), PackageVersion: p.version,
		PrimaryPackagePurpose: "APPLICATION", PackageLicenseDeclared: license,
		PackageChecksums:          []common.Checksum{{Algorithm: common.SHA256, Value: p.sum}},
		PackageExternalReferences: purl("golang", p.info.Main.Path, p.version),
	})
	std := &debug.Module{Path: "stdlib", Version: strings.TrimPrefix(p.info.GoVersion, "go")}
	for _, m := range append([]*debug.Module{std}, p.info.Deps...) {
		if m.Replace != nil {
			m = m.Replace
		}
		library := &spdx.Package{
			PackageName: m.Path, PackageSPDXIdentifier: elementID("module", m.Path, m.Version), PackageVersion: m.Version,
			PrimaryPackagePurpose: "LIBRARY", PackageExternalReferences: purl("golang", m.Path, m.Version),
		}
		if m.Sum != "" {
			library.PackageComment = "go.sum " + m.Sum
		}
		d.relate(id, common.TypeRelationshipDependsOn, d.add(library))
	}
	return id
}

// purl returns the package URL.
func purl(kind, name, version string) []*spdx.PackageExternalReference {
	return []*spdx.PackageExternalReference{{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL,
		Locator: "pkg:" + kind + "/" + name + "@" + strings.NewReplacer("+", "%2B", ":", "%3A").Replace(version)}}
}

// notInID matches what an identifier of SPDX cannot contain.
var notInID = regexp.MustCompile(`[^a-zA-Z0-9.-]+`)

func elementID(parts ...string) common.ElementID {
	return common.ElementID(notInID.ReplaceAllString(strings.Join(parts, "-"), "-"))
}
