package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// object is a JSON object.
type object = map[string]any

// document is an OpenAPI document, with its parts in the order in which they are written.
type document struct {
	OpenAPI    string   `json:"openapi"`
	Info       object   `json:"info"`
	Servers    []any    `json:"servers,omitempty"`
	Security   []any    `json:"security,omitempty"`
	Tags       []object `json:"tags"`
	Paths      object   `json:"paths"`
	Components object   `json:"components"`
}

// merge makes one document of several. streams are the operations whose answer is a stream; frame is laid over the result.
func merge(documents [][]byte, streams map[string]bool, frame object) ([]byte, error) {
	out := document{OpenAPI: "3.1.0", Info: object{}, Paths: object{}, Components: object{}}
	schemas := object{}
	for _, raw := range documents {
		var d struct {
			Tags       []object
			Paths      map[string]map[string]object
			Components struct{ Schemas object }
		}
		if err := json.Unmarshal(raw, &d); err != nil {
			return nil, fmt.Errorf("reading a document: %w", err)
		}
		out.Tags = append(out.Tags, d.Tags...)
		maps.Copy(schemas, d.Components.Schemas)
		for path, item := range d.Paths {
			if err := addPath(out.Paths, path, item, streams); err != nil {
				return nil, err
			}
		}
	}
	for _, tag := range out.Tags {
		tag["description"] = joined(tag["description"])
	}
	slices.SortFunc(out.Tags, func(a, b object) int { return strings.Compare(text(a["name"]), text(b["name"])) })
	out.Components["schemas"] = schemas
	raw, err := json.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("writing the document: %w", err)
	}
	return lay(shortNames(raw, schemas), frame)
}

// lay lays the frame over the document and formats it.
func lay(raw []byte, frame object) ([]byte, error) {
	var whole object
	if err := json.Unmarshal(raw, &whole); err != nil {
		return nil, fmt.Errorf("laying the frame over the document: %w", err)
	}
	overlay(whole, frame)
	raw, err := json.Marshal(whole)
	if err != nil {
		return nil, fmt.Errorf("laying the frame over the document: %w", err)
	}
	var out document
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, fmt.Errorf("laying the frame over the document: %w", err)
	}
	if raw, err = json.MarshalIndent(out, "", "  "); err != nil {
		return nil, fmt.Errorf("writing the document: %w", err)
	}
	return append(raw, '\n'), nil
}

// overlay adds what over has to base: objects are merged, lists appended, and everything else is replaced.
func overlay(base, over object) {
	for key, value := range over {
		switch value := value.(type) {
		case object:
			if below, ok := base[key].(object); ok {
				overlay(below, value)
				continue
			}
		case []any:
			if below, ok := base[key].([]any); ok {
				base[key] = append(below, value...)
				continue
			}
		}
		base[key] = value
	}
}

// addPath adds the operations of a path. A parameter such as {sandbox.name} is called by its last word, so that all
// operations on a resource share one path.
func addPath(paths object, path string, item map[string]object, streams map[string]bool) error {
	path = regexp.MustCompile(`\{[^}]*\.([^.}]*)\}`).ReplaceAllString(path, "{$1}")
	known, ok := paths[path].(object)
	if !ok {
		known = object{}
		paths[path] = known
	}
	for method, operation := range item {
		if _, taken := known[method]; taken {
			return fmt.Errorf("two operations for %s %s", strings.ToUpper(method), path)
		}
		adjust(operation, streams)
		known[method] = operation
	}
	return nil
}

// adjust completes an operation.
func adjust(operation object, streams map[string]bool) {
	comment := joined(operation["summary"])
	operation["summary"], _, _ = strings.Cut(strings.TrimSuffix(comment, "."), ". ")
	operation["description"] = comment
	list, _ := operation["parameters"].([]any)
	for _, p := range list {
		parameter, _ := p.(object)
		if name := text(parameter["name"]); parameter["in"] == "path" {
			parameter["name"] = name[strings.LastIndex(name, ".")+1:]
		}
		parameter["description"] = joined(parameter["description"])
	}
	id := text(operation["operationId"])
	if base := regexp.MustCompile(`_\d+$`).ReplaceAllString(id, ""); streams[base] {
		stream(operation)
	}
}

// stream describes the answer of a stream as the gateway sends it.
func stream(operation object) {
	responses, _ := operation["responses"].(object)
	success, _ := responses["200"].(object)
	content, _ := success["content"].(object)
	message, _ := content["application/json"].(object)
	failure, _ := responses["default"].(object)["content"].(object)["application/json"].(object)
	success["description"] = text(success["description"]) +
		" Each line is one JSON object: {\"result\": ...}, or {\"error\": ...} in the last line of a stream that fails."
	success["content"] = object{"application/x-ndjson": object{"schema": object{
		"type":       "object",
		"properties": object{"result": message["schema"], "error": failure["schema"]},
	}}}
}

// shortNames drops the package of each schema whose name is unique without it.
func shortNames(raw []byte, schemas object) []byte {
	count := map[string]int{}
	for name := range schemas {
		count[short(name)]++
	}
	out := string(raw)
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(schemas))) { // a nested message before the one around it
		if count[short(name)] == 1 {
			out = strings.ReplaceAll(out, `"`+name+`":`, `"`+short(name)+`":`)
			out = strings.ReplaceAll(out, `"#/components/schemas/`+name+`"`, `"#/components/schemas/`+short(name)+`"`)
		}
	}
	return []byte(out)
}

// short returns a message's name without its package.
func short(name string) string {
	i := strings.IndexFunc(name, func(r rune) bool { return r >= 'A' && r <= 'Z' })
	return name[max(i, 0):]
}

// joined returns a comment with its paragraphs on one line each.
func joined(comment any) string {
	paragraphs := strings.Split(text(comment), "\n\n")
	for i, p := range paragraphs {
		paragraphs[i] = strings.Join(strings.Fields(p), " ")
	}
	return strings.Join(paragraphs, "\n\n")
}

func text(v any) string {
	s, _ := v.(string)
	return s
}
